// From a layer's output on a GPU to a launch of the summary kernel, without the interpreter.
//
// Where the host is what a model waits for, a forward hook in Python costs several times what it
// costs alone, since the model's own Python has pushed everything of ours out of the caches. So the
// common case (a plain tensor of the known shape and dtype, on the known stream) is checked and
// launched here, by the CUDA driver that torch has loaded; for anything else the caller gets false
// back and goes the long way. Neither torch's nor CUDA's headers are needed.

#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shortcut.hpp"

namespace nb = nanobind;

namespace tensortap {
namespace {

using Result = int;
using Launch = Result (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, void*, void**, void**);
using IsCapturing = Result (*)(void*, int*);
using Current = Result (*)(void**);
using ParamInfo = Result (*)(void*, std::size_t, std::size_t*, std::size_t*);

template <typename F>
F symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<F>(found);
}

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// The names that are asked for on every call.
struct Names {
  PyObject *shape = interned("shape"), *dtype = interned("dtype"),
           *contiguous = interned("is_contiguous"), *negative = interned("is_neg"),
           *device = interned("get_device"), *address = interned("data_ptr"),
           *acquire = interned("acquire"), *release = interned("release"),
           *send = interned("send"), *settle = interned("settle"),
           *calls = interned("next_call"), *seen = interned("seen"), *epoch = interned("epoch"),
           *batch = interned("batch"), *sink = interned("_sink"),
           *unfinished = interned("_unfinished"), *compiled = interned("_compiled"),
           *in_graph = interned("_in_graph"), *open = interned("open");
};

const Names& names() {
  static const Names all;
  return all;
}

nb::object asked(nb::handle of, PyObject* name) {
  PyObject* found = PyObject_GetAttr(of.ptr(), name);
  if (!found) throw nb::python_error();
  return nb::steal(found);
}

nb::object called(nb::handle of, PyObject* name) {
  PyObject* self = of.ptr();
  PyObject* found = PyObject_VectorcallMethod(name, &self, 1, nullptr);
  if (!found) throw nb::python_error();
  return nb::steal(found);
}

nb::object answered(nb::handle question) {
  PyObject* found = PyObject_CallNoArgs(question.ptr());
  if (!found) throw nb::python_error();
  return nb::steal(found);
}

std::uint64_t number(nb::handle value) {
  const std::uint64_t found = PyLong_AsUnsignedLongLong(value.ptr());
  if (found == static_cast<std::uint64_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  return found;
}

long small(nb::handle value) {
  const long found = PyLong_AsLong(value.ptr());
  if (found == -1 && PyErr_Occurred()) throw nb::python_error();
  return found;
}

void set(nb::handle of, PyObject* name, long value) {
  nb::object boxed = nb::steal(PyLong_FromLong(value));
  if (PyObject_SetAttr(of.ptr(), name, boxed.ptr())) throw nb::python_error();
}

struct Locked {
  explicit Locked(nb::handle lock) : lock_(lock) { called(lock_, names().acquire); }
  ~Locked() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* self = lock_.ptr();
    Py_XDECREF(PyObject_VectorcallMethod(names().release, &self, 1, nullptr));
    PyErr_Restore(type, value, trace);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  nb::handle lock_;
};

class Shortcut {
 public:
  // `values` are the kernel's arguments, (bytes, value); `places` says which of them are the
  // addresses of the parts, of the tensor and of its row. What the compiler has added behind them
  // is left 0. `state` and `lines` are the table's own memory: see recording/device_table.py.
  Shortcut(const std::string& library, std::uintptr_t function, unsigned programs,
           unsigned threads, unsigned shared, std::uintptr_t stream,
           const std::vector<std::pair<int, std::uint64_t>>& values,
           std::array<std::size_t, 3> places, nb::object type, nb::object shape, nb::object dtype,
           long device, nb::object stream_of, nb::object backward, nb::object functions,
           nb::object dispatches, nb::object table, nb::object lock,
           std::uintptr_t state, std::uintptr_t lines, nb::object slot, nb::object sink,
           nb::object order, std::int64_t site, std::int64_t rows, std::uint64_t row_bytes,
           std::uint64_t row_address, std::uint64_t parts, std::int64_t parts_bytes,
           std::int64_t room)
      : function_(reinterpret_cast<void*>(function)), programs_(programs), threads_(threads),
        shared_(shared), stream_(stream), type_(std::move(type)), shape_(std::move(shape)),
        dtype_(std::move(dtype)), device_(device), stream_of_(std::move(stream_of)),
        backward_(std::move(backward)), functions_(std::move(functions)),
        dispatches_(std::move(dispatches)),
        table_(std::move(table)), lock_(std::move(lock)), slot_(std::move(slot)),
        sink_(std::move(sink)), order_(std::move(order)),
        used_(reinterpret_cast<std::int64_t*>(state)), left_(used_ + 1),
        lines_(reinterpret_cast<Line*>(lines)), site_(site), rows_(rows), row_bytes_(row_bytes),
        row_address_(row_address), parts_(parts), parts_bytes_(parts_bytes), room_(room),
        index_(nb::int_(device)) {
    void* driver = dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (!driver) throw std::runtime_error("the CUDA driver cannot be loaded");
    launch_ = symbol<Launch>(driver, "cuLaunchKernel");
    capturing_ = symbol<IsCapturing>(driver, "cuStreamIsCapturing");
    current_ = symbol<Current>(driver, "cuCtxGetCurrent");
    const auto info = symbol<ParamInfo>(driver, "cuFuncGetParamInfo");
    if (current_(&context_)) throw std::runtime_error("there is no CUDA context");
    lay_out(info, values, places);
  }

  // `state` is the tap: nothing may be under way that a shortcut would miss, no backward pass that
  // computes this forward again, and no mode of the user's that would see what is asked here.
  bool take(nb::handle output, nb::handle state) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(output.ptr())) != type_.ptr()) return false;
    const Names& n = names();
    if (asked(state, n.sink).is_none() || !asked(state, n.unfinished).is_none()) return false;
    const int behind = PyObject_IsTrue(asked(state, n.compiled).ptr());
    if (behind < 0) throw nb::python_error();
    nb::object in_graph = asked(state, n.in_graph);
    if (behind || (!in_graph.is_none() && asked(in_graph, n.open).ptr() != Py_False)) return false;
    if (small(answered(backward_)) != -1 || small(answered(functions_)) != 0 ||
        small(answered(dispatches_)) != 0)
      return false;
    if (asked(output, n.dtype).ptr() != dtype_.ptr()) return false;
    const int same = PyObject_RichCompareBool(asked(output, n.shape).ptr(), shape_.ptr(), Py_EQ);
    if (same < 0) throw nb::python_error();
    if (!same || small(called(output, n.device)) != device_) return false;
    if (called(output, n.contiguous).ptr() != Py_True) return false;
    if (called(output, n.negative).ptr() != Py_False) return false;
    PyObject* argument = index_.ptr();
    nb::object now = nb::steal(PyObject_Vectorcall(stream_of_.ptr(), &argument, 1, nullptr));
    if (!now.is_valid()) throw nb::python_error();
    if (number(now) != stream_) return false;
    void* context = nullptr;
    int captured = 0;
    if (current_(&context) || context != context_) return false;
    if (capturing_(reinterpret_cast<void*>(stream_), &captured) || captured) return false;
    const std::uint64_t address = number(called(output, n.address));
    if (!address || address % 16) return false;
    return launched(address);
  }

 private:
  struct Line {
    std::int64_t site, order, epoch, batch, call;
  };

  void lay_out(ParamInfo info, const std::vector<std::pair<int, std::uint64_t>>& values,
               const std::array<std::size_t, 3>& places) {
    for (const std::size_t place : places)
      if (place >= values.size()) throw std::runtime_error("no such argument");
    std::size_t offset = 0, bytes = 0, count = 0;
    for (; info(function_, count, &offset, &bytes) == 0; ++count) {
      const bool ours = count < values.size();
      if (bytes != (ours ? static_cast<std::size_t>(values[count].first) : 8))
        throw std::runtime_error("the kernel takes other arguments");
      arguments_.resize(offset + bytes, 0);
      if (ours) std::memcpy(arguments_.data() + offset, &values[count].second, bytes);
      for (std::size_t i = 0; i < places.size(); ++i)
        if (count == places[i]) offsets_[i] = offset;
    }
    if (count < values.size()) throw std::runtime_error("the kernel takes fewer arguments");
  }

  bool launched(std::uint64_t address) {
    const Names& n = names();
    Locked held(lock_);
    if (*used_ >= rows_) {
      called(table_, n.send);
      if (*used_ >= rows_) return false;
    }
    if (*left_ + room_ > parts_bytes_) called(table_, n.settle);
    const std::int64_t used = *used_;
    const std::uint64_t addresses[] = {parts_ + *left_, address, row_address_ + used * row_bytes_};
    for (std::size_t i = 0; i < offsets_.size(); ++i)
      std::memcpy(arguments_.data() + offsets_[i], &addresses[i], 8);
    std::size_t size = arguments_.size();
    // CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END
    void* extra[] = {reinterpret_cast<void*>(1), arguments_.data(), reinterpret_cast<void*>(2),
                     &size, nullptr};
    Result result;
    {
      nb::gil_scoped_release released;
      result = launch_(function_, programs_, 1, 1, threads_, 1, 1, shared_,
                       reinterpret_cast<void*>(stream_), nullptr, extra);
    }
    if (result)
      throw std::runtime_error("a launch failed with CUDA error " + std::to_string(result));
    *left_ += room_;
    Line& line = lines_[used];
    line.call = small(answered(asked(slot_, n.calls)));
    line.order = small(answered(order_));
    line.epoch = small(asked(sink_, n.epoch));
    line.batch = small(asked(sink_, n.batch));
    line.site = site_;  // from here on it is known
    *used_ = used + 1;
    set(slot_, n.seen, small(asked(slot_, n.seen)) + 1);
    return true;
  }

  Launch launch_;
  IsCapturing capturing_;
  Current current_;
  void* function_;
  void* context_ = nullptr;
  unsigned programs_, threads_, shared_;
  std::uint64_t stream_;
  std::vector<char> arguments_;
  std::array<std::size_t, 3> offsets_{};
  nb::object type_, shape_, dtype_;
  long device_;
  nb::object stream_of_, backward_, functions_, dispatches_, table_, lock_, slot_, sink_, order_;
  std::int64_t *used_, *left_;
  Line* lines_;
  std::int64_t site_, rows_;
  std::uint64_t row_bytes_, row_address_, parts_;
  std::int64_t parts_bytes_, room_;
  nb::int_ index_;
};

}  // namespace

void bind_shortcut(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Shortcut>(m, "Shortcut")
      .def(nb::init<const std::string&, std::uintptr_t, unsigned, unsigned, unsigned,
                    std::uintptr_t, const std::vector<std::pair<int, std::uint64_t>>&,
                    std::array<std::size_t, 3>, nb::object, nb::object, nb::object, long,
                    nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    std::uintptr_t, std::uintptr_t, nb::object, nb::object, nb::object,
                    std::int64_t, std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                    std::int64_t, std::int64_t>(),
           "library"_a, "function"_a, "programs"_a, "threads"_a, "shared"_a, "stream"_a,
           "values"_a, "places"_a, "type"_a, "shape"_a, "dtype"_a, "device"_a,
           "stream_of"_a, "backward"_a, "functions"_a, "dispatches"_a, "table"_a, "lock"_a,
           "state"_a, "lines"_a, "slot"_a, "sink"_a, "order"_a, "site"_a, "rows"_a, "row_bytes"_a,
           "row_address"_a, "parts"_a, "parts_bytes"_a, "room"_a)
      .def("__call__", &Shortcut::take, "output"_a.none(), "state"_a);
}

}  // namespace tensortap
