// Callers from many threads share random numbers of tasks on the pool, with a team for several rounds and without; every
// task runs once, whatever its thread.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <random>
#include <vector>

#include "pool.h"

long missed(int64_t tasks, int64_t threads) {
  std::vector<int> seen(tasks, 0);  // plain: a thread sanitizer sees who else writes
  tw::Pool::share(tasks, threads, [&](int64_t i) {
    seen[i]++;
    for (int spin = 0; spin < i * 7; spin++) asm volatile("");
  });
  return tasks - std::count(seen.begin(), seen.end(), 1);
}

int main(int count, char**) {
  std::atomic<long> wrong{0};
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 20; caller++)
    callers.emplace_back([&, caller] {
      std::mt19937 draw(caller);
      for (int i = 0; i < 1000; i++) {
        wrong += missed(draw() % 40, 1 + draw() % 6);
        const tw::Pool::Team team(1 + draw() % 6);
        for (unsigned rounds = draw() % 5; rounds; rounds--) wrong += missed(draw() % 40, 1 + draw() % 6);
      }
    });
  for (auto& caller : callers) caller.join();
  if (count > 1) {  // a child has none of these threads
    if (!fork()) _exit(missed(1000, 4) != 0);
    int status = 0;
    wait(&status);
    wrong += status;
  }
  std::printf("%ld\n", wrong.load() + missed(1000, 4));
}
