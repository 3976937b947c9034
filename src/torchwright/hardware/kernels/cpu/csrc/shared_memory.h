// Sums and gathers over the processes of one machine, through memory that they share.
//
// A round has one barrier. Each process copies its numbers into its slot, says that it has arrived, waits for the
// others, and reads all slots in the order of the processes: every process computes the same bits. Slots are doubled, so
// that nobody writes over what others still read: who writes round n + 2 has seen all arrive at n + 1, and so leave n.
//
// A process holds a lock on its own byte of the file for as long as it lives and has the memory open. The system
// releases it however the process ends, so that the others learn of it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "rest.h"

namespace tw {

class SharedMemory {
 public:
  static constexpr int64_t LINE = 64, MOST_WAYS = 256;

  // The file has `size(ways, room)` zeros, and every process opens it once as another rank. `room` is the bytes of a
  // slot; more numbers take several rounds. `patience` is the seconds after which a process that lives, and does not
  // arrive, is given up. All faults are std::runtime_error.
  SharedMemory(const std::string& path, int64_t rank, int64_t ways, int64_t room, double patience)
      : rank(rank), ways(ways), room(room), patience(patience) {
    file = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    require(file >= 0, "the shared memory cannot be opened: ", std::strerror(errno));
    try {
      struct stat found {};
      require(fstat(file, &found) == 0 && found.st_size == size(ways, room), "the shared memory has ", found.st_size,
              " bytes, not the ", size(ways, room), " of ", ways, " processes");
      struct flock own = lock_of(rank);
      require(fcntl(file, F_SETLK, &own) == 0, "another process is rank ", rank, " already");
      void* mapped = mmap(nullptr, size(ways, room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      require(mapped != MAP_FAILED, "the shared memory cannot be mapped: ", std::strerror(errno));
      memory = (char*)mapped;
    } catch (...) {
      close(file);
      throw;
    }
  }

  ~SharedMemory() {
    munmap(memory, size(ways, room));
    close(file);
  }
  SharedMemory(const SharedMemory&) = delete;

  static int64_t size(int64_t ways, int64_t room) { return ways * int64_t(sizeof(Seat)) + 2 * ways * room; }

  // The `count` numbers become the sums of all processes' numbers. T's sums are made as Wide, and rounded once by T(…).
  // Processes whose `kind` differs make different calls.
  template <class T, class Wide>
  void sum(T* numbers, int64_t count, int64_t kind) {
    const int64_t most = room / int64_t(sizeof(T));
    for (int64_t begin = 0; begin < count; begin += most) {
      const int64_t some = std::min(most, count - begin);
      const char* slots = exchange((const char*)(numbers + begin), some * int64_t(sizeof(T)), kind);
      add<T, Wide>(numbers + begin, slots, some);
    }
  }

  // `to` gets the `bytes` of each process, one after the other.
  void gather(const char* from, char* to, int64_t bytes, int64_t kind) {
    for (int64_t begin = 0; begin < bytes; begin += room) {
      const int64_t some = std::min(room, bytes - begin);
      const char* slots = exchange(from + begin, some, kind);
      for (int64_t other = 0; other < ways; other++) std::memcpy(to + other * bytes + begin, slots + other * room, some);
    }
  }

  const int64_t rank, ways, room;

 private:
  using Clock = std::chrono::steady_clock;
  // A wait spins for as long as processes that compute alike are apart, then gives its core away, then sleeps, and looks
  // now and then whether those that are missing live.
  static constexpr std::chrono::microseconds SPIN{50}, AWAKE{1000}, SLEEP{50}, LOOK{100'000};

  struct alignas(64) Seat {
    std::atomic<uint64_t> arrived;  // rounds
    uint64_t call[2];               // what the process exchanges, by round: bytes and kind
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  static struct flock lock_of(int64_t rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
    return lock;
  }

  template <class... Words>
  static void require(bool holds, const Words&... words) {
    if (!holds) throw std::runtime_error((text(words) + ...));
  }
  static std::string text(const char* word) { return word; }
  static std::string text(int64_t number) { return std::to_string(number); }

  Seat& seat(int64_t rank) const { return ((Seat*)memory)[rank]; }

  template <class T, class Wide>
  void add(T* to, const char* slots, int64_t count) const {
    constexpr int64_t LANES = 16;  // a compiler makes vectors of so many
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
      Wide total[LANES];
      for (int64_t lane = 0; lane < LANES; lane++) total[lane] = Wide(((const T*)slots)[i + lane]);
      for (int64_t other = 1; other < ways; other++) {
        const T* from = (const T*)(slots + other * room) + i;
        for (int64_t lane = 0; lane < LANES; lane++) total[lane] += Wide(from[lane]);
      }
      for (int64_t lane = 0; lane < LANES; lane++) to[i + lane] = T(total[lane]);
    }
    for (; i < count; i++) {
      Wide total = Wide(((const T*)slots)[i]);
      for (int64_t other = 1; other < ways; other++) total += Wide(((const T*)(slots + other * room))[i]);
      to[i] = T(total);
    }
  }

  // The slots of all processes, which hold `bytes` each until the next call.
  const char* exchange(const char* from, int64_t bytes, int64_t kind) {
    require(!broken, "the processes have lost each other before");
    broken = true;  // unless the round ends
    round++;
    const int64_t half = round & 1, call = bytes * 256 + kind;
    char* slots = memory + ways * int64_t(sizeof(Seat)) + half * ways * room;
    std::memcpy(slots + rank * room, from, bytes);
    seat(rank).call[half] = call;
    seat(rank).arrived.store(round, std::memory_order_release);
    for (int64_t other = 0; other < ways; other++) {
      await(other);
      require(int64_t(seat(other).call[half]) == call, "process ", other, " exchanges ",
              int64_t(seat(other).call[half] / 256), " bytes where process ", rank, " exchanges ", bytes,
              ": every process has to make the same calls with the same arguments");
    }
    broken = false;
    return slots;
  }

  void await(int64_t other) const {
    if (here(other)) return;
    const auto begun = Clock::now();
    auto looked = begun;
    while (!here(other)) {
      const auto now = Clock::now();
      if (now - begun < SPIN) {
        rest();
        continue;
      }
      if (now - begun < AWAKE) std::this_thread::yield();
      else std::this_thread::sleep_for(SLEEP);
      if (now - looked < LOOK) continue;
      looked = now;
      // It may have arrived and ended since.
      require(lives(other) || here(other), "process ", other, " has ended, or let go of the model");
      require(std::chrono::duration<double>(now - begun).count() < patience, "process ", other,
              " lives, and has not come for ", int64_t(patience), " s");
    }
  }

  bool here(int64_t other) const { return seat(other).arrived.load(std::memory_order_acquire) >= round; }

  bool lives(int64_t other) const {
    struct flock found = lock_of(other);
    return other == rank || fcntl(file, F_GETLK, &found) != 0 || found.l_type != F_UNLCK;
  }

  const double patience;
  int file = -1;
  char* memory = nullptr;
  uint64_t round = 0;
  bool broken = false;
};

}  // namespace tw
