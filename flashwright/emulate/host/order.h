// Streams, events and graphs. All work is done in the order in which the program asks for it.
#pragma once

#include <set>

#include "host.h"

namespace fwh {

struct Graph {
  std::vector<Work> work;
};

struct Stream {
  unsigned flags = 0;
  int priority = 0;
  Graph* captured = nullptr;  // where its work goes, instead of being done
  bool origin = false;        // whether the capture began here
};

struct Event {
  bool recorded = false;
  int64_t nanoseconds = 0;
  Graph* captured = nullptr;
  unsigned flags = 0;
};

// A node of a graph is its number in the order in which nodes were added.
struct Node {
  Graph* graph;
  size_t number;
};

template <class T>
class Handles {
 public:
  T* make() {
    T* made = new T;
    all_.insert(made);
    return made;
  }
  bool has(const void* handle) const { return all_.count(static_cast<T*>(const_cast<void*>(handle))) != 0; }
  T* get(const void* handle) const { return has(handle) ? static_cast<T*>(const_cast<void*>(handle)) : nullptr; }
  bool end(const void* handle) {
    if (!has(handle)) return false;
    all_.erase(static_cast<T*>(const_cast<void*>(handle)));
    delete static_cast<T*>(const_cast<void*>(handle));
    return true;
  }
  template <class F>
  void each(F&& f) {
    for (T* one : all_) f(*one);
  }

 private:
  std::set<T*> all_;
};

extern Handles<Stream> streams;
extern Handles<Event> events;
extern Handles<Graph> graphs, executables;

Stream* stream_of(void* handle);  // null for an invalid one, which has been told
int record(void* event, void* stream);
int wait_for(void* stream, void* event);
int elapsed(float* milliseconds, void* start, void* end);
int begin_capture(void* stream);
int end_capture(void* stream, void** graph);
int run_graph(void* executable, void* stream);
int add_node(void** node, void* graph, Work work);

}  // namespace fwh
