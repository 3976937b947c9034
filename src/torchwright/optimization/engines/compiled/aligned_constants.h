// A package's weights start on a page. AOTInductor's runtime allocates them by std::malloc, whose large blocks start 16
// bytes past one, so that half of all vectors of 32 bytes and each of 64 lie in two cache lines. valloc's memory is freed
// by free, too.
#pragma once
#include <cstdlib>  // before the macro: it takes macros of this name away
namespace std {
using ::valloc;
}
#define malloc valloc
