// A thread that waits for another by looking again and again.
#pragma once

namespace tw {

inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace tw
