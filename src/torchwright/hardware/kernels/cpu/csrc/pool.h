// Threads that share tasks with their caller, on a machine that may be busy with others' work.
//
// A parallel region of OpenMP ends when every thread has come to its end, so one that the machine has put aside holds
// all others up, whether or not it had anything left to do. Here the caller takes tasks too, and waits only for those
// that a helper has begun: with no helper running at all it does everything itself. A thread with nothing to do spins
// briefly, then gives its core to whoever wants it, then sleeps.
//
// A team keeps its helpers between one round of tasks and the next: what a round then costs is two threads looking at
// one line of memory.
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

#include "rest.h"

namespace tw {

class Pool {
  class Job;

 public:
  // The process's own. A child of fork() has none of its parent's threads, and so begins with a pool of its own.
  static Pool& here() {
    static const int told = pthread_atfork(nullptr, nullptr, [] { instance() = new Pool; });
    (void)told;
    return *instance();
  }

  // What this thread shares while a team of its own lives is done with the same helpers.
  class Team {
   public:
    explicit Team(int64_t threads) : mine(current ? nullptr : here().open(std::min(threads, MOST_THREADS) - 1)) {
      if (mine) current = mine;
    }
    ~Team() {
      if (!mine) return;
      current = nullptr;
      mine->close();
    }
    Team(const Team&) = delete;

   private:
    Job* const mine;
  };

  // body(0) to body(tasks - 1), each once, on `threads` threads at most with the caller's. They throw nothing, and
  // share nothing themselves.
  template <class Body>
  static void share(int64_t tasks, int64_t threads, const Body& body) {
    const Team team(std::min(tasks, threads));
    if (tasks > 1 && current)
      return here().round(*current, tasks, [](const void* body, int64_t i) { (*(const Body*)body)(i); }, &body);
    for (int64_t i = 0; i < tasks; i++) body(i);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t MOST_THREADS = 1024, JOBS = 16;  // callers at once; those beyond work alone
  // A helper without work gives its core away after SPIN, and sleeps after AWAKE; a caller sleeps after PATIENCE, which
  // most tasks end within.
  static constexpr std::chrono::microseconds SPIN{20}, AWAKE{1000}, PATIENCE{100};

  // The tasks of one caller, round after round. Whoever has taken a task may read what it is, because a round ends with
  // its last task; whoever has none may come and go at any time, and nobody waits for them.
  class alignas(64) Job {
   public:
    std::atomic<bool> claimed{false};

    void open(int64_t helpers) { seats.store(next_term() | uint64_t(helpers), std::memory_order_release); }
    void close() {
      seats.store(next_term(), std::memory_order_relaxed);
      claimed.store(false, std::memory_order_release);
    }

    int64_t missing() const { return int64_t(seats.load(std::memory_order_relaxed) % TERM); }

    void begin(int64_t count, void (*one)(const void*, int64_t), const void* with) {
      tasks = count, run = one, body = with;
      unfinished.store(int32_t(count), std::memory_order_relaxed);
      left.store(int32_t(count), std::memory_order_release);
    }

    // Takes tasks until all are taken; whether there was one.
    bool work() {
      bool any = false;
      for (int32_t now = left.load(std::memory_order_relaxed); now > 0;) {
        if (!left.compare_exchange_weak(now, now - 1, std::memory_order_acquire, std::memory_order_relaxed)) continue;
        run(body, tasks - now);
        any = true;
        if (unfinished.fetch_sub(1, std::memory_order_release) == 1) unfinished.notify_one();
        now = left.load(std::memory_order_relaxed);
      }
      return any;
    }

    // Returns when every task that was taken has ended.
    void finish() {
      if (!unfinished.load(std::memory_order_acquire)) return;
      const auto begun = Clock::now();
      for (int32_t now; (now = unfinished.load(std::memory_order_acquire));)
        if (Clock::now() - begun < PATIENCE) rest();
        else unfinished.wait(now, std::memory_order_relaxed);  // whoever has one was put aside, perhaps for this thread
    }

    // Works for as long as the caller has rounds; whether there was a task. Leaves a team that has none for long.
    bool help() {
      const uint64_t term = enter();
      if (!term) return false;
      bool any = false;
      for (auto begun = Clock::now(); seats.load(std::memory_order_relaxed) / TERM == term / TERM;) {
        if (work()) {
          any = true, begun = Clock::now();
          continue;
        }
        const auto waited = Clock::now() - begun;
        if (waited > AWAKE) {
          leave(term);
          break;
        }
        if (waited < SPIN) rest();
        else sched_yield();
      }
      return any;
    }

   private:
    static constexpr uint64_t TERM = 1 << 16;  // teams are counted above, free seats below

    uint64_t next_term() const { return (seats.load(std::memory_order_relaxed) / TERM + 1) * TERM; }

    // A seat among the team's helpers, or 0.
    uint64_t enter() {
      uint64_t now = seats.load(std::memory_order_relaxed);
      while (now % TERM)
        if (seats.compare_exchange_weak(now, now - 1, std::memory_order_acquire, std::memory_order_relaxed)) return now;
      return 0;
    }

    void leave(uint64_t term) {
      uint64_t now = seats.load(std::memory_order_relaxed);
      while (now / TERM == term / TERM && !seats.compare_exchange_weak(now, now + 1, std::memory_order_relaxed)) {
      }
    }

    int64_t tasks = 0;
    void (*run)(const void*, int64_t) = nullptr;
    const void* body = nullptr;
    alignas(64) std::atomic<int32_t> left{0};        // tasks that nobody has taken
    alignas(64) std::atomic<int32_t> unfinished{0};  // tasks that have not ended
    alignas(64) std::atomic<uint64_t> seats{0};
  };

  static Pool*& instance() {
    static Pool* pool = new Pool;  // never deleted: its threads live as long as the process
    return pool;
  }

  // A job with room for so many helpers, or none where it would have no helper.
  Job* open(int64_t helpers) {
    if (helpers < 1) return nullptr;
    for (Job& job : jobs)
      if (!job.claimed.load(std::memory_order_relaxed) && !job.claimed.exchange(true, std::memory_order_acquire)) {
        start(helpers);
        job.open(helpers);
        return &job;
      }
    return nullptr;
  }

  void round(Job& job, int64_t tasks, void (*one)(const void*, int64_t), const void* body) {
    job.begin(tasks, one, body);
    if (int64_t missing = job.missing()) {
      bell.fetch_add(1);
      for (; missing; missing--) bell.notify_one();
    }
    job.work();
    job.finish();
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
      for (Job& job : jobs) found |= job.help();
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

  static inline thread_local Job* current = nullptr;  // of the team that this thread has

  Job jobs[JOBS];
  alignas(64) std::atomic<uint32_t> bell{0};  // rung for every job
  std::mutex starting;
  std::atomic<int64_t> running{0};
};

}  // namespace tw
