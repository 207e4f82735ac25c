/* AVX-512 with VNNI: 16 rows are one register. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include <immintrin.h>
#include <stdint.h>

#define KERNELS kernels_avx512
#define PANELS 2     /* strip: 32 rows */
#define COLUMNS 16   /* words of a row turned at a time */
#define TILE 12      /* tokens that share a loaded weight: 24 sums in 32 registers */
#define QUERY_TILE 8 /* rows of queries that share a loaded key: 16 sums */
#define SCORE_LANES 2 /* whose products are summed at once: 16 sums */
#define KEY_TILE 8   /* keys that share a loaded vector of a query */
#define VALUE_VECTORS(rows) ((rows) > 4 ? 2 : 4) /* of their outputs that are summed at once */
#define TILES(run) run(12) run(8) run(4) run(2) run(1)

typedef __m512 vf;
typedef __m512i vi;

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_scale_exponent(vf v, vi n) { return _mm512_scalef_ps(v, _mm512_cvtepi32_ps(n)); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_abs(vf v) { return _mm512_abs_ps(v); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_from_int(vi v) { return _mm512_cvtepi32_ps(v); }
static inline vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vf vf_load_bf16(const uint16_t *p)
{
    const vi wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
/* The permutation looks at four bits of each lane alone, so nothing has to be masked. */
static inline vf vf_from_nibble(vi v)
{
    return _mm512_permutexvar_ps(v, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf vf_from_byte(vi v)
{
    const vi byte = _mm512_and_si512(v, _mm512_set1_epi32(255));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(byte, _mm512_set1_epi32(128)));
}

static inline vi vi_round(vf v) { return _mm512_cvtps_epi32(v); }
static inline void vi_narrow(int8_t *p, vi v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(v)); }
static inline void nibble_order(int8_t *p)
{
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128((__m128i *)p, _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)p), order));
}
static inline vi vi_set1(int x) { return _mm512_set1_epi32(x); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
static inline vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
static inline vi vi_load_int8(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline void vi_store(uint8_t *p, vi v) { _mm512_storeu_si512(p, v); }
static inline vi vi_and_nibbles(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
static inline vi vi_shift_right(vi v, int bits) { return _mm512_srli_epi32(v, (unsigned)bits); }

/* Transpose 16 rows of `count` words, with zeros past them, which are not read: the last row may end where its file
 * does. The same bytes of the next panel are asked for on the way. */
static inline void turn(const uint8_t *const rows[16], int64_t offset, int count, int64_t ahead, vi out[16])
{
    vi a[16], b[16];
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    for (int r = 0; r < 16; r++) {
        const uint8_t *at = rows[r] + offset;
        a[r] = _mm512_maskz_loadu_epi32(mask, at);
        _mm_prefetch((const char *)at + ahead, _MM_HINT_T1);
    }
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    for (int i = 0; i < 4; i++) { /* now a[4 r + i] holds column i of rows 4 r to 4 r + 3, four columns apart */
        const vi p = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), q = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        const vi s = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd), t = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        out[i] = _mm512_shuffle_i32x4(p, q, 0x88);
        out[8 + i] = _mm512_shuffle_i32x4(p, q, 0xdd);
        out[4 + i] = _mm512_shuffle_i32x4(s, t, 0x88);
        out[12 + i] = _mm512_shuffle_i32x4(s, t, 0xdd);
    }
}

/* Lanes half a vector apart first, then a quarter, ...: for sums as for maxima. */
static inline float vf_add_lanes(vf v)
{
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float vf_max_lanes(vf v)
{
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
/* As float16 of 2^-8 times the size, whose exponent is one bit longer. */
static inline vf vf_load_e4m3(const uint8_t *p)
{
    const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), most = _mm256_set1_epi16(127);
    const __m256i size = _mm256_and_si256(code, most), sign = _mm256_slli_epi16(_mm256_andnot_si256(most, code), 8);
    const __m256i nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(size, most), 1);
    const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(size, 7), sign), nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

static inline vi spread(const int8_t *q)
{
    int32_t four;
    __builtin_memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

/* Several chains for few tokens hide the latency of the products; integer sums may be in any order. */
static inline __attribute__((always_inline)) void dot_bytes(const uint8_t *const *w, const int8_t *q, int64_t width,
                                                            int quads, int tokens, vi (*dot)[PANELS])
{
    vi sum[TILE][PANELS][4];
    const int chains = tokens <= 2 ? 4 : tokens == 4 ? 2 : 1;
    for (int t = 0; t < tokens; t++)
        for (int n = 0; n < PANELS; n++)
            for (int c = 0; c < chains; c++)
                sum[t][n][c] = _mm512_setzero_si512();
    for (int i = 0; i < quads; i += chains) /* quads are a multiple of four */
        for (int c = 0; c < chains; c++)
            for (int t = 0; t < tokens; t++) {
                const vi four = spread(q + t * width + 4 * (i + c));
                for (int n = 0; n < PANELS; n++)
                    sum[t][n][c] =
                        _mm512_dpbusd_epi32(sum[t][n][c], _mm512_loadu_si512(w[n] + 64 * (i + c)), four);
            }
    for (int t = 0; t < tokens; t++)
        for (int n = 0; n < PANELS; n++) {
            dot[t][n] = sum[t][n][0];
            for (int c = 1; c < chains; c++)
                dot[t][n] = _mm512_add_epi32(dot[t][n], sum[t][n][c]);
        }
}
#define dot_nibbles dot_bytes

/* One register of a vector: all of it. */
#define vp vf
#define vp_load vf_load
#define vp_load_f16 vf_load_f16
#define vp_load_bf16 vf_load_bf16
#define vp_fma vf_fma
#define VP_OF(v, h) (&(v))
#define HOLD(v) __asm__("" : "+v"(v))
#define TILE_SUMS 24
#define TILE_TOKENS 8
#define ROW_TILES(run) run(8, 3) run(6, 4) run(4, 6) run(2, 8) run(1, 8) /* tokens by rows of floats: up to 24 sums */

/* The sums of eight vectors; each halving adds the lanes of two. */
static inline void add_lanes_of_8(const vf *v, float *out)
{
    vf a[4], b[2];
    for (int i = 0; i < 4; i++) { /* the eighths of the order in which they come out */
        const vf p = v[i], q = v[i + 4];
        a[i] = vf_add(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xee));
    }
    for (int i = 0; i < 2; i++)
        b[i] = vf_add(_mm512_shuffle_f32x4(a[i], a[i + 2], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 2], 0xdd));
    /* quarters of b: 0 4 2 6 and 1 5 3 7 */
    const __m512d p = _mm512_castps_pd(b[0]), q = _mm512_castps_pd(b[1]);
    const vf two = vf_add(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    const vf one = vf_add(two, _mm512_permute_ps(two, 0xb1));
    const vi order = _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one)));
}

#include "panel.h"
#else
typedef int not_x86;
#endif
