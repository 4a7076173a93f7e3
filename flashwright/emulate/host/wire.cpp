// The connection to the emulator: a request and its answer, over a socket of this machine.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "host.h"

namespace fwh {

std::recursive_mutex lock;
thread_local int last_error = kSuccess;

namespace {

constexpr const char* kSocket = "FLASHWRIGHT_EMULATE_SOCKET";
int connection = -1;
pid_t owner = 0;

void say(const std::string& text) { std::fprintf(stderr, "flashwright: %s\n", text.c_str()); }

bool send_all(const void* data, size_t size) {
  auto at = static_cast<const char*>(data);
  while (size > 0) {
    ssize_t sent = send(connection, at, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    at += sent;
    size -= sent;
  }
  return true;
}

bool receive_all(void* data, size_t size) {
  auto at = static_cast<char*>(data);
  while (size > 0) {
    ssize_t got = recv(connection, at, size, 0);
    if (got <= 0) return false;
    at += got;
    size -= got;
  }
  return true;
}

bool send_file(int file) {
  char byte = 0, room[CMSG_SPACE(sizeof file)] = {};
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof file);
  std::memcpy(CMSG_DATA(head), &file, sizeof file);
  return sendmsg(connection, &message, MSG_NOSIGNAL) == 1;
}

Answer exchange(Request request, const std::string& content) {
  Answer answer;
  uint64_t head[2] = {request, content.size()};
  int64_t told[2];
  if (!send_all(head, sizeof head) || !send_all(content.data(), content.size()) || !receive_all(told, sizeof told)) {
    say("the emulator does not answer any more");
    std::_Exit(2);
  }
  answer.error = static_cast<int>(told[0]);
  answer.content.resize(told[1]);
  if (!receive_all(answer.content.data(), answer.content.size())) std::_Exit(2);
  return answer;
}

// Whether there is an emulator.
bool connected() {
  if (connection >= 0) return !is_forked();
  const char* path = std::getenv(kSocket);
  sockaddr_un place{};
  place.sun_family = AF_UNIX;
  static bool told = false;
  if (path == nullptr || std::strlen(path) >= sizeof place.sun_path) {
    if (!told) say("run this program by `flashwright emulate-program`");
    told = true;
    return false;
  }
  std::strcpy(place.sun_path, path);
  int file = -1;
  connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0 || connect(connection, reinterpret_cast<sockaddr*>(&place), sizeof place) != 0) {
    say("the emulator cannot be reached");
    std::_Exit(2);
  }
  owner = getpid();
  if (!open_arena(file)) {
    say("this process has no room for the device's memory (2 TiB of addresses): a limit (ulimit -v), or a sanitizer");
    std::_Exit(2);
  }
  uint64_t head[2] = {kHello, 0};
  if (!send_all(head, sizeof head) || !send_file(file)) std::_Exit(2);
  close(file);
  return true;
}

}  // namespace

bool is_forked() {
  static bool told = false;
  if (connection < 0 || owner == getpid()) return false;
  if (!told) say("a forked process calls CUDA, which its parent had called before: CUDA does not support that");
  told = true;
  return true;
}

Answer ask(Request request, const Message& message) {
  if (!connected()) return {};
  return exchange(request, message.content());
}

int done(int error) {
  if (error != kSuccess) last_error = error;
  return error;
}

int fail(int error, const std::string& text) {
  const char* name = error_name(error);
  ask(kNote, Message().number(kMisuse).text(text + (name ? std::string(" (") + name + ")" : "")));
  return done(error);
}

int refuse(const std::string& name) {
  ask(kNote, Message().number(kRefused).text(name));
  return done(kNotSupported);
}

}  // namespace fwh
