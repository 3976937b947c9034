// Threads that share tasks with their caller, on a machine that may be busy with others' work.
//
// A parallel region of OpenMP ends when every thread has come to its end, so one that the machine has put aside holds
// all others up, whether or not it had anything left to do. Here the caller takes tasks too, and waits only for those
// that a helper has begun: with no helper running at all it does everything itself. A thread with nothing to do spins
// briefly, then gives its core to whoever wants it, then sleeps.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace tw {

class Pool {
 public:
  // The process's own. A child of fork() has none of its parent's threads, and so begins with a pool of its own.
  static Pool& here() {
    static const int told = pthread_atfork(nullptr, nullptr, [] { instance() = new Pool; });
    (void)told;
    return *instance();
  }

  // body(0) to body(tasks - 1), each once, on `threads` threads at most with the caller's. They throw nothing.
  template <class Body>
  void share(int64_t tasks, int64_t threads, const Body& body) {
    const int64_t helpers = std::min({tasks, threads, MOST_THREADS}) - 1;
    Job* job = helpers > 0 ? claim() : nullptr;
    if (!job) {
      for (int64_t i = 0; i < tasks; i++) body(i);
      return;
    }
    start(helpers);
    job->open(tasks, helpers, [](const void* body, int64_t i) { (*(const Body*)body)(i); }, &body);
    bell.fetch_add(1);
    for (int64_t i = 0; i < helpers; i++) bell.notify_one();
    job->work();
    job->close();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t MOST_THREADS = 1024, JOBS = 16;  // callers at once; those beyond work alone
  // A helper without work gives its core away after SPIN, and sleeps after AWAKE; a caller sleeps after PATIENCE, which
  // most tasks end within.
  static constexpr std::chrono::microseconds SPIN{20}, AWAKE{1000}, PATIENCE{100};

  class alignas(64) Job {
   public:
    std::atomic<bool> claimed{false};

    void open(int64_t count, int64_t helpers, void (*one)(const void*, int64_t), const void* with) {
      tasks = count, run = one, body = with;
      next.store(0, std::memory_order_relaxed);
      places.store(uint32_t(helpers), std::memory_order_release);
    }

    bool enter() {
      uint32_t now = places.load(std::memory_order_relaxed);
      while (now % INSIDE)
        if (places.compare_exchange_weak(now, now - 1 + INSIDE, std::memory_order_acquire)) return true;
      return false;
    }

    void work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(body, i);
    }

    void leave() {
      if (places.fetch_sub(INSIDE, std::memory_order_release) == INSIDE) places.notify_one();
    }

    // Nobody enters any more; returns when all have left.
    void close() {
      places.fetch_and(~(INSIDE - 1), std::memory_order_relaxed);
      const auto begun = Clock::now();
      for (uint32_t now; (now = places.load(std::memory_order_acquire));)
        if (Clock::now() - begun < PATIENCE) rest();
        else places.wait(now, std::memory_order_relaxed);  // whoever it is has been put aside, perhaps for this thread
      claimed.store(false, std::memory_order_release);
    }

   private:
    static constexpr uint32_t INSIDE = 1 << 16;  // threads inside are counted above, places left below
    int64_t tasks = 0;
    void (*run)(const void*, int64_t) = nullptr;
    const void* body = nullptr;
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<uint32_t> places{0};
  };

  static Pool*& instance() {
    static Pool* pool = new Pool;  // never deleted: its threads live as long as the process
    return pool;
  }

  static void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Job* claim() {
    for (Job& job : jobs)
      if (!job.claimed.load(std::memory_order_relaxed) && !job.claimed.exchange(true, std::memory_order_acquire))
        return &job;
    return nullptr;
  }

  void start(int64_t wanted) {
    if (running.load(std::memory_order_relaxed) >= wanted) return;
    const std::lock_guard guard(starting);
    sigset_t all, before;  // signals are for the threads that the program knows
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; running.load() < wanted; running.fetch_add(1)) std::thread([this] { help(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void help() {
    for (;;) {
      const uint32_t heard = bell.load();
      bool found = false;
      for (Job& job : jobs)
        if (job.enter()) {
          job.work();
          job.leave();
          found = true;
        }
      if (!found) await(heard);
    }
  }

  void await(uint32_t heard) {
    const auto begun = Clock::now();
    for (auto waited = begun - begun; bell.load() == heard; waited = Clock::now() - begun) {
      if (waited < SPIN) rest();
      else if (waited < AWAKE) sched_yield();
      else bell.wait(heard);
    }
  }

  Job jobs[JOBS];
  alignas(64) std::atomic<uint32_t> bell{0};  // rung for every job
  std::mutex starting;
  std::atomic<int64_t> running{0};
};

}  // namespace tw
