/* AVX2 with the 256-bit VNNI instructions. */
#define KERNELS kernels_avxvnni
#define TARGET_PRAGMA GCC target("avx2,fma,f16c,avxvnni")
#define DPBUSD 1
#include "isa_256.h"
