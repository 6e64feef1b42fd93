// A load generator for streams of server-sent events, small enough that it does not disturb what it measures.
//
//   http_load PORT PATH BODY_STREAM BODY_PROBE STREAMS TOKENS RATE WARM SECONDS
//
// STREAMS connections each send BODY_STREAM again and again, for TOKENS tokens, the first time for fewer so that they
// do not all end at once; beside them BODY_PROBE is sent at random times, RATE a second (Poisson), or with RATE 0 one
// after the other. Bodies are files; BODY_STREAM has @@@@@ for the number of tokens. After WARM seconds it prints
// "begin" and measures for SECONDS:
//   {"first_byte_us": [...], "events": N, "cpu_seconds": S, "wall_seconds": S, "faults": N}
// first_byte_us: a probe written to the first byte of its first event. events: of streams and probes. A response that
// is not 200, or a connection that closes, is a fault.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double Now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

double Cpu() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  return use.ru_utime.tv_sec + use.ru_stime.tv_sec + (use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1e-6;
}

[[noreturn]] void Fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

std::string ReadFile(const char* name) {
  std::ifstream file(name, std::ios::binary);
  if (!file) Fail(name);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string Request(const std::string& path, const std::string& body) {
  return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

// `body` with the number of tokens that it asks for; all are of one length.
std::string Asking(std::string body, int tokens) {
  constexpr std::string_view kHole = "@@@@@";
  const auto at = body.find(kHole);
  if (at == std::string::npos) return body;
  const std::string digits = std::to_string(tokens);
  return body.replace(at, kHole.size(), std::string(kHole.size() - digits.size(), ' ') + digits);
}

struct Connection {
  int fd = -1;
  bool probe = false;
  bool busy = false;
  bool answered = false;  // the first event has come
  double sent = 0;
  std::string tail;  // what a marker may begin in
};

class Load {
 public:
  Load(int port, std::string path, std::string stream, std::string probe, int streams, int tokens)
      : port_(port), path_(path), body_(stream), probe_(Request(path, probe)), streams_(streams), tokens_(tokens) {
    stream_ = Request(path_, Asking(body_, tokens_));
    poll_ = epoll_create1(0);
    probes_poll_ = epoll_create1(0);
    if (poll_ < 0 || probes_poll_ < 0) Fail("epoll_create1");
    epoll_event event{};  // without a connection: a probe is ready
    event.events = EPOLLIN;
    epoll_ctl(poll_, EPOLL_CTL_ADD, probes_poll_, &event);
  }

  void Open(bool probe) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(port_));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) < 0) Fail("connect");
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    connections_.push_back(std::make_unique<Connection>());
    Connection& made = *connections_.back();
    made.fd = fd;
    made.probe = probe;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &made;
    epoll_ctl(probe ? probes_poll_ : poll_, EPOLL_CTL_ADD, fd, &event);
  }

  void Send(Connection& c) { Send(c, c.probe ? probe_ : stream_); }

  void Send(Connection& c, const std::string& request) {
    c.busy = true;
    c.answered = false;
    c.tail.clear();
    c.sent = Now();
    if (write(c.fd, request.data(), request.size()) != static_cast<ssize_t>(request.size())) Fail("write");
  }

  void SendStreams() {
    int at = 0;
    for (auto& c : connections_)
      if (!c->probe) Send(*c, Request(path_, Asking(body_, 1 + tokens_ * at++ / streams_)));
  }

  // A probe on a connection that is idle, or on a new one.
  void Probe() {
    for (auto& c : connections_)
      if (c->probe && !c->busy && c->fd >= 0) return Send(*c);
    Open(true);
    Send(*connections_.back());
  }

  bool ProbeIsOut() const {
    for (auto& c : connections_)
      if (c->probe && c->busy) return true;
    return false;
  }

  // What comes within so many seconds. Probes are looked at between a few events of streams: else they would seem to
  // come as late as this has read all that a step of the server sends.
  void Wait(double seconds) {
    constexpr int kFew = 8;
    epoll_event events[kFew];
    for (int found = kFew, timeout = std::max(0, static_cast<int>(seconds * 1000)); found == kFew; timeout = 0) {
      found = epoll_wait(poll_, events, kFew, timeout);
      for (int i = 0; i < found; ++i)
        if (events[i].data.ptr != nullptr) Read(*static_cast<Connection*>(events[i].data.ptr));
      epoll_event probes[kFew];
      const int ready = epoll_wait(probes_poll_, probes, kFew, 0);
      for (int i = 0; i < ready; ++i) Read(*static_cast<Connection*>(probes[i].data.ptr));
    }
  }

  void Begin() {
    first_.clear();
    events_ = 0;
    began_ = Now();
    cpu_ = Cpu();
  }

  void Print() const {
    std::printf("{\"first_byte_us\": [");
    for (std::size_t i = 0; i < first_.size(); ++i) std::printf("%s%.1f", i ? ", " : "", first_[i] * 1e6);
    std::printf("], \"events\": %ld, \"cpu_seconds\": %.4f, \"wall_seconds\": %.4f, \"faults\": %ld}\n", events_,
                Cpu() - cpu_, Now() - began_, faults_);
  }

 private:
  void Read(Connection& c) {
    char buffer[1 << 16];
    for (;;) {
      const ssize_t n = read(c.fd, buffer, sizeof buffer);
      if (n < 0) return;
      if (n == 0) {
        if (c.busy && ++faults_ == 1) std::fprintf(stderr, "the server closed a connection in use\n");
        epoll_ctl(c.probe ? probes_poll_ : poll_, EPOLL_CTL_DEL, c.fd, nullptr);
        close(c.fd);
        c.fd = -1;
        return;
      }
      Take(c, std::string_view(buffer, static_cast<std::size_t>(n)));
    }
  }

  void Take(Connection& c, std::string_view news) {
    constexpr std::string_view kEvent = "\ndata: {";
    constexpr std::string_view kEnd = "0\r\n\r\n";
    c.tail.append(news);
    std::size_t at = 0;
    for (std::size_t found; (found = c.tail.find(kEvent, at)) != std::string::npos; at = found + kEvent.size()) {
      ++events_;
      if (!c.answered && c.probe) first_.push_back(Now() - c.sent);
      c.answered = true;
    }
    const bool ended = c.tail.size() >= kEnd.size() && c.tail.ends_with(kEnd);
    if (!c.answered && c.tail.starts_with("HTTP/1.1 ") && !c.tail.starts_with("HTTP/1.1 200")) {
      if (++faults_ == 1) std::fprintf(stderr, "%s\n", c.tail.c_str());
      c.busy = false;
      return;
    }
    c.tail.erase(0, std::max(at, c.tail.size() - std::min(c.tail.size(), kEvent.size())));
    if (!ended) return;
    c.busy = false;
    if (!c.probe) Send(c);
  }

  int port_, poll_, probes_poll_;
  std::string path_, body_, stream_, probe_;
  int streams_, tokens_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<double> first_;
  long events_ = 0, faults_ = 0;
  double began_ = 0, cpu_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) {
    std::fprintf(stderr, "usage: http_load PORT PATH BODY_STREAM BODY_PROBE STREAMS TOKENS RATE WARM SECONDS\n");
    return 2;
  }
  const std::string path = argv[2];
  const int streams = std::atoi(argv[5]);
  const double rate = std::atof(argv[7]), warm = std::atof(argv[8]), seconds = std::atof(argv[9]);
  Load load(std::atoi(argv[1]), path, ReadFile(argv[3]), ReadFile(argv[4]), streams, std::atoi(argv[6]));
  for (int i = 0; i < streams; ++i) load.Open(false);
  load.Open(true);
  load.SendStreams();
  std::mt19937_64 random(1);
  std::exponential_distribution<double> gap(rate > 0 ? rate : 1);
  const double start = Now();
  double next = start + (rate > 0 ? gap(random) : 0);
  bool measuring = false;
  while (Now() < start + warm + seconds) {
    if (!measuring && Now() >= start + warm) {
      measuring = true;
      load.Begin();
      std::printf("begin\n");
      std::fflush(stdout);
    }
    if (Now() >= next && (rate > 0 || !load.ProbeIsOut())) {
      load.Probe();
      next += rate > 0 ? gap(random) : 0;
    }
    load.Wait(rate > 0 ? std::min(next - Now(), 0.05) : 0.05);
  }
  load.Print();
  return 0;
}
