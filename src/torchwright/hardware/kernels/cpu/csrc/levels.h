// The instruction sets that were compiled, and which of them this processor and its system have.
//
// A set is taken only if every extension that its compiler flags (cpu/build.py) let the compiler write is there. What
// the system says is asked, never the processor's own registers or /proc/cpuinfo: the first are forbidden on some
// systems, and the second is the host's under emulation.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

#if defined(TW_HAVE_AMX)
namespace amx { const tw::Kernels& table(); }
#endif
#if defined(TW_HAVE_AVX512)
namespace avx512 { const tw::Kernels& table(); }
#endif
#if defined(TW_HAVE_AVX2_VNNI)
namespace avx2_vnni { const tw::Kernels& table(); }
#endif
#if defined(TW_HAVE_AVX2)
namespace avx2 { const tw::Kernels& table(); }
#endif
#if defined(TW_HAVE_BF16)
namespace bf16 { const tw::Kernels& table(); }
#endif
#if defined(TW_HAVE_I8MM)
namespace i8mm { const tw::Kernels& table(); }
#endif
#if defined(TW_HAVE_DOTPROD)
namespace dotprod { const tw::Kernels& table(); }
#endif
#if defined(TW_HAVE_NEON)
namespace neon { const tw::Kernels& table(); }
#endif
namespace portable { const tw::Kernels& table(); }

namespace tw {

#if defined(TW_HAVE_AVX2) || defined(TW_HAVE_AVX2_VNNI) || defined(TW_HAVE_AVX512) || defined(TW_HAVE_AMX)
// All of x86-64-v3, which a virtual machine may have in part.
inline bool has_avx2() {
  constexpr unsigned MOVBE = 1u << 22, F16C = 1u << 29, LZCNT = 1u << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (MOVBE | F16C)) != (MOVBE | F16C)) return false;
  if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !(c & LZCNT)) return false;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
#endif

#if defined(TW_HAVE_AVX2_VNNI)
inline bool has_avx_vnni() {
  // Not every compiler's __builtin_cpu_supports knows it.
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(TW_HAVE_AMX)
// Tiles need the CPU's word and the operating system's permission, which it gives to the whole process.
inline bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#endif

#if defined(TW_HAVE_AVX512) || defined(TW_HAVE_AMX)
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}
#endif

#if defined(__aarch64__)
struct ArmFeatures {
  bool dotprod = false, i8mm = false, bf16 = false;
};

#if defined(__linux__)
// The kernel's bits (uapi/asm/hwcap.h), what all cores have; headers older than an extension lack its name.
inline ArmFeatures arm_features() {
  constexpr unsigned long CRC32 = 1ul << 7, ATOMICS = 1ul << 8, ASIMDRDM = 1ul << 12, ASIMDDP = 1ul << 20;
  constexpr unsigned long I8MM = 1ul << 13, BF16 = 1ul << 14, V82 = CRC32 | ATOMICS | ASIMDRDM | ASIMDDP;
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  const bool dotprod = (first & V82) == V82;
  return {dotprod, dotprod && (second & I8MM), dotprod && (second & BF16)};
}
#elif defined(__APPLE__)
// Every processor of Apple's that runs macOS has Armv8.4; the rest is asked. Not run yet.
inline ArmFeatures arm_features() {
  const auto has = [](const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
  };
  const bool dotprod = has("hw.optional.arm.FEAT_DotProd");
  return {dotprod, dotprod && has("hw.optional.arm.FEAT_I8MM"), dotprod && has("hw.optional.arm.FEAT_BF16")};
}
#else
inline ArmFeatures arm_features() { return {}; }
#endif
#endif

// What this CPU can run, best first. The names are those of TORCHWRIGHT_ISA.
inline std::vector<std::pair<std::string, const Kernels* (*)()>> runnable() {
  std::vector<std::pair<std::string, const Kernels* (*)()>> all;
#if defined(TW_HAVE_AMX)
  if (has_avx512() && has_amx()) all.emplace_back("amx", [] { return &amx::table(); });
#endif
#if defined(TW_HAVE_AVX512)
  if (has_avx512()) all.emplace_back("avx512", [] { return &avx512::table(); });
#endif
#if defined(TW_HAVE_AVX2_VNNI)
  if (has_avx2() && has_avx_vnni()) all.emplace_back("avx2_vnni", [] { return &avx2_vnni::table(); });
#endif
#if defined(TW_HAVE_AVX2)
  if (has_avx2()) all.emplace_back("avx2", [] { return &avx2::table(); });
#endif
#if defined(__aarch64__)
  const ArmFeatures arm = arm_features();
  (void)arm;
#endif
#if defined(TW_HAVE_BF16)
  if (arm.bf16 && arm.i8mm) all.emplace_back("bf16", [] { return &bf16::table(); });
#endif
#if defined(TW_HAVE_I8MM)
  if (arm.i8mm) all.emplace_back("i8mm", [] { return &i8mm::table(); });
#endif
#if defined(TW_HAVE_DOTPROD)
  if (arm.dotprod) all.emplace_back("dotprod", [] { return &dotprod::table(); });
#endif
#if defined(TW_HAVE_NEON)
  all.emplace_back("neon", [] { return &neon::table(); });
#endif
  all.emplace_back("portable", [] { return &portable::table(); });
  return all;
}

}  // namespace tw
