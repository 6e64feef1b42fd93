// The plain tokens of a step, written to the sockets of their streams in one call.
//
// A lane is a stream of which nothing can come next but text, in events of one form: HEAD "text" MIDDLE [number END],
// each as a chunk of HTTP/1.1. Where marks may come (of a tool call, say), no token is plain that has a byte with which
// one begins, nor one that ends in white space. Invariant: the bytes are those that the event's frame in Python would
// have given, and whatever is not a plain token of an open lane is handed back untouched, with all that comes behind it
// on its lane. What a lane has written is told when it is closed.
#include <Python.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

struct Lane {
  int fd;
  std::string head, middle, end;
  std::optional<std::int64_t> number;  // of the next event, where events are numbered
  double last;                         // when its last token came, seconds
  const std::vector<bool>* plain;      // of each token
  std::vector<std::int64_t> tokens;    // written
  std::int64_t events = 0;             // written
  bool held = false;                   // something that is not plain came: the rest is for the caller
  bool full = false;                   // its socket took less than it was given: nothing more may go there
};

struct Chunk {
  std::int64_t request;
  Lane* lane;
  std::size_t begin, size;  // in the step's bytes
  std::size_t sent = 0;
};

py::object Interned(const char* name) { return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name)); }

template <typename T>
void AppendNumber(std::string& out, T value, int base) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value, base).ptr);
}

class Lanes {
 public:
  // `texts`: each token's text as a JSON string without its quotes; none for one that is not plain.
  explicit Lanes(const std::vector<std::optional<std::string>>& texts) {
    for (const auto& text : texts) {
      texts_.emplace_back(bytes_.size(), text ? text->size() : 0);
      if (text) bytes_ += *text;
      plain_.push_back(text && !text->empty());
    }
  }

  void OpenLane(std::int64_t request, int fd, std::string head, std::string middle, std::string end,
                std::optional<std::int64_t> number, double last, const std::optional<std::string>& marks) {
    const Lane lane{
        fd, std::move(head), std::move(middle), std::move(end), number, last, marks ? &Among(*marks) : &plain_, {}};
    if (!lanes_.try_emplace(request, lane).second) throw std::invalid_argument("the request has a lane already");
  }

  // (tokens that were written, how many events they were, when the last one came).
  std::tuple<std::vector<std::int64_t>, std::int64_t, double> Close(std::int64_t request) {
    auto found = lanes_.extract(request);
    if (found.empty()) throw std::invalid_argument("the request has no lane");
    Lane& lane = found.mapped();
    return {std::move(lane.tokens), lane.events, lane.last};
  }

  // Writes what it can of some deltas that came `now`. (deltas that are the caller's, seconds between tokens -> how
  // often, (request, bytes that its socket did not take)).
  py::tuple Step(const py::list& deltas, double now) {
    Begin();
    py::list rest;
    for (const py::handle delta : deltas)
      if (!Take(delta, now)) rest.append(delta);
    return Finish(rest);
  }

  // The same of plain deltas, pairs of int64 (request, token); `make` makes a delta of those that are the caller's.
  py::tuple StepPlain(const py::bytes& pairs, double now, const py::function& make) {
    Begin();
    py::list rest;
    const std::string_view view = pairs;
    for (std::size_t at = 0; at + 2 * sizeof(std::int64_t) <= view.size(); at += 2 * sizeof(std::int64_t)) {
      std::int64_t request = 0, token = 0;
      std::memcpy(&request, view.data() + at, sizeof request);
      std::memcpy(&token, view.data() + at + sizeof request, sizeof token);
      tokens_.assign(1, token);
      const auto found = lanes_.find(request);
      if (found != lanes_.end() && Open(found->second, true)) {
        Add(request, found->second, now);
        continue;
      }
      py::list ids;
      ids.append(token);
      rest.append(make(request, ids));
    }
    return Finish(rest);
  }

 private:
  // Which tokens are plain where marks that begin with these bytes are looked for. Few different ones are asked for.
  const std::vector<bool>& Among(const std::string& marks) {
    const auto [found, fresh] = among_.try_emplace(marks, plain_);
    if (!fresh) return found->second;
    const std::string never = marks + '\\';  // what is escaped in JSON may be white space, or a mark's byte
    for (std::size_t token = 0; token < texts_.size(); ++token) {
      if (!plain_[token]) continue;
      const std::string_view text = std::string_view(bytes_).substr(texts_[token].first, texts_[token].second);
      found->second[token] = text.back() != ' ' && text.find_first_of(never) == std::string_view::npos;
    }
    return found->second;
  }

  void Begin() {
    step_.clear();
    chunks_.clear();
    gaps_.clear();
  }

  // Sends what was added; the result of a step.
  py::tuple Finish(const py::list& rest) {
    {
      const py::gil_scoped_release release;
      for (Chunk& chunk : chunks_) {
        if (chunk.lane->full) continue;
        const ssize_t n = send(chunk.lane->fd, step_.data() + chunk.begin, chunk.size, MSG_DONTWAIT | MSG_NOSIGNAL);
        chunk.sent = n > 0 ? static_cast<std::size_t>(n) : 0;
        chunk.lane->full = chunk.sent < chunk.size;
      }
    }
    py::list unsent;
    for (const Chunk& chunk : chunks_)
      if (chunk.sent < chunk.size) {
        const py::bytes left(step_.data() + chunk.begin + chunk.sent, chunk.size - chunk.sent);
        unsent.append(py::make_tuple(chunk.request, left));
      }
    py::dict gaps;
    for (const auto& [seconds, count] : gaps_) gaps[py::float_(seconds)] = count;
    return py::make_tuple(rest, gaps, unsent);
  }

  // Whether a delta is plain and its lane open: then its event is among the writes.
  bool Take(py::handle delta, double now) {
    const auto request = py::getattr(delta, request_id_).cast<std::int64_t>();
    const auto found = lanes_.find(request);
    if (found == lanes_.end()) return false;
    const bool bare = py::getattr(delta, finish_reason_).is_none() && py::getattr(delta, logprobs_).is_none();
    tokens_.clear();
    for (const py::handle token : py::list(py::getattr(delta, token_ids_)))
      tokens_.push_back(token.cast<std::int64_t>());
    if (!Open(found->second, bare)) return false;
    Add(request, found->second, now);
    return true;
  }

  // Whether a lane takes tokens_, which come `bare`; once it does not, it takes nothing more.
  bool Open(Lane& lane, bool bare) const {
    const auto plain = [&lane](std::int64_t id) {
      return id >= 0 && id < static_cast<std::int64_t>(lane.plain->size()) &&
             (*lane.plain)[static_cast<std::size_t>(id)];
    };
    lane.held |= !bare || tokens_.empty() || !std::all_of(tokens_.begin(), tokens_.end(), plain);
    return !lane.held && !lane.full;
  }

  // The event of tokens_.
  void Add(std::int64_t request, Lane& lane, double now) {
    event_ = lane.head;
    event_ += '"';
    for (const std::int64_t token : tokens_) {
      const auto& [at, size] = texts_[static_cast<std::size_t>(token)];
      event_.append(bytes_, at, size);
    }
    event_ += '"';
    event_ += lane.middle;
    if (lane.number) AppendNumber(event_, (*lane.number)++, 10);
    event_ += lane.end;
    const std::size_t begin = step_.size();
    AppendNumber(step_, event_.size(), 16);
    step_ += "\r\n";
    step_ += event_;
    step_ += "\r\n";
    chunks_.push_back({request, &lane, begin, step_.size() - begin});
    lane.tokens.insert(lane.tokens.end(), tokens_.begin(), tokens_.end());
    ++lane.events;
    const auto count = static_cast<std::int64_t>(tokens_.size());
    gaps_[(now - lane.last) / static_cast<double>(count)] += count;
    lane.last = now;
  }

  const py::object request_id_ = Interned("request_id"), token_ids_ = Interned("token_ids"),
                   finish_reason_ = Interned("finish_reason"), logprobs_ = Interned("logprobs");
  std::string bytes_;
  std::vector<std::pair<std::size_t, std::size_t>>
      texts_;                // of each token: where its text is in bytes_, and its length
  std::vector<bool> plain_;  // of each token, where no marks are looked for
  std::unordered_map<std::string, std::vector<bool>> among_;  // by the first bytes of marks
  std::unordered_map<std::int64_t, Lane> lanes_;
  std::string step_, event_;
  std::vector<std::int64_t> tokens_;  // of the delta that is looked at
  std::vector<Chunk> chunks_;
  std::unordered_map<double, std::int64_t> gaps_;
};

}  // namespace

PYBIND11_MODULE(_lanes, m) {
  py::class_<Lanes>(m, "Lanes")
      .def(py::init<const std::vector<std::optional<std::string>>&>(), py::arg("texts"))
      .def("open", &Lanes::OpenLane, py::arg("request"), py::kw_only(), py::arg("fd"), py::arg("head"),
           py::arg("middle"), py::arg("end"), py::arg("number"), py::arg("last"), py::arg("marks") = py::none())
      .def("close", &Lanes::Close, py::arg("request"))
      .def("step", &Lanes::Step, py::arg("deltas"), py::arg("now"))
      .def("step_plain", &Lanes::StepPlain, py::arg("pairs"), py::arg("now"), py::arg("make"));
}
