#include "order.h"

#include <chrono>

namespace fwh {

Handles<Stream> streams;
Handles<Event> events;
Handles<Graph> graphs, executables;

namespace {

Stream usual;    // the default stream
int captures = 0;  // that are under way
int broken = kSuccess;

int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

int invalid(const char* what) { return fail(kInvalidHandle, std::string("a ") + what + " that does not exist is used"); }

}  // namespace

void break_off(int error) { broken = error; }

bool capturing() { return captures > 0; }

Stream* stream_of(void* handle) {
  if (reinterpret_cast<uint64_t>(handle) <= 2) return &usual;  // null, cudaStreamLegacy, cudaStreamPerThread
  Stream* found = streams.get(handle);
  if (found == nullptr) invalid("stream");
  return found;
}

int submit(void* handle, Work work) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->captured != nullptr) {
    stream->captured->work.push_back(std::move(work));
    return done(kSuccess);
  }
  if (stream == &usual && capturing()) {
    return fail(kCaptureImplicit, "work of the default stream while another stream is captured");
  }
  return work();
}

int submit_now(Work work) {
  if (capturing()) return fail(kCaptureImplicit, "a call that waits for the device while a stream is captured");
  int error = work();
  return error != kSuccess ? error : done(broken);
}

int synchronize_stream(void* handle) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->captured != nullptr) return fail(kCaptureUnsupported, "a captured stream is waited for");
  return done(broken);
}

int synchronize() {
  if (capturing()) return fail(kCaptureUnsupported, "the device is waited for while a stream is captured");
  return done(broken);
}

int record(void* handle, void* stream_handle) {
  Event* event = events.get(handle);
  Stream* stream = stream_of(stream_handle);
  if (event == nullptr) return invalid("event");
  if (stream == nullptr) return kInvalidHandle;
  event->captured = stream->captured;
  event->recorded = stream->captured == nullptr;
  event->nanoseconds = now();
  return done(kSuccess);
}

int wait_for(void* stream_handle, void* handle) {
  Event* event = events.get(handle);
  Stream* stream = stream_of(stream_handle);
  if (event == nullptr) return invalid("event");
  if (stream == nullptr) return kInvalidHandle;
  if (event->captured != nullptr && stream->captured == nullptr) stream->captured = event->captured;
  return done(kSuccess);
}

int elapsed(float* milliseconds, void* start, void* end) {
  Event *from = events.get(start), *to = events.get(end);
  if (from == nullptr || to == nullptr) return invalid("event");
  if (!from->recorded || !to->recorded) return fail(kInvalidHandle, "the time of an event that was not recorded");
  *milliseconds = static_cast<float>(to->nanoseconds - from->nanoseconds) * 1e-6f;
  return done(kSuccess);
}

int begin_capture(void* handle) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream == &usual && reinterpret_cast<uint64_t>(handle) != 2) {
    return fail(kCaptureUnsupported, "the default stream cannot be captured");
  }
  if (stream->captured != nullptr) return fail(kIllegalState, "a stream is captured already");
  stream->captured = graphs.make();
  stream->origin = true;
  ++captures;
  return done(kSuccess);
}

int end_capture(void* handle, void** graph) {
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->captured == nullptr) return fail(kIllegalState, "the end of a capture that has not begun");
  if (!stream->origin) return fail(kCaptureUnmatched, "a capture ends in another stream than it has begun in");
  *graph = stream->captured;
  streams.each([&](Stream& other) {
    if (other.captured == *graph) other.captured = nullptr;
  });
  stream->captured = nullptr;
  stream->origin = false;
  --captures;
  return done(kSuccess);
}

int run_graph(void* handle, void* stream) {
  Graph* graph = executables.get(handle);
  if (graph == nullptr) return invalid("graph");
  return submit(stream, [work = graph->work] {
    int error = kSuccess;
    for (const Work& one : work) {
      int found = one();
      if (error == kSuccess) error = found;
    }
    return error;
  });
}

int add_node(void** node, void* handle, Work work) {
  Graph* graph = graphs.get(handle);
  if (graph == nullptr) return invalid("graph");
  graph->work.push_back(std::move(work));
  if (node != nullptr) *node = new Node{graph, graph->work.size() - 1};
  return done(kSuccess);
}

}  // namespace fwh
