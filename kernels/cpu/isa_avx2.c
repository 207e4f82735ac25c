/* AVX2: 16 rows are two registers. Pairs of products are summed in 16 bits. */
#define KERNELS kernels_avx2
#define TARGET_PRAGMA GCC target("avx2,fma,f16c")
#define DPBUSD 0
#include "isa_256.h"
