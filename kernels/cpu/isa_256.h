/* 256-bit registers: what isa_avx2.c and isa_avxvnni.c share; they differ in the products of bytes. */
#if defined(__x86_64__)
#define DO_PRAGMA(x) _Pragma(#x)
#define PRAGMA(x) DO_PRAGMA(x)
PRAGMA(TARGET_PRAGMA)
#include <immintrin.h>
#include <stdint.h>

#define PANELS 1
#define COLUMNS 8 /* words of a row turned at a time */
#define TILE 4    /* tokens that share a loaded weight: 8 sums in 16 registers */
#define QUERY_TILE 6 /* rows of queries that share a loaded key */
#define SCORE_LANES 1 /* whose products are summed at once */
#define KEY_TILE 4   /* keys that share a loaded vector of a query */
#define VALUE_VECTORS(rows) ((rows) > 2 ? 1 : 2) /* of their outputs that are summed at once */
#define TILES(run) run(4) run(2) run(1)

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;

static inline vf vf_make(__m256 a, __m256 b) { vf v = {a, b}; return v; }
static inline vi vi_make(__m256i a, __m256i b) { vi v = {a, b}; return v; }
static inline __m256i load256(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline __m128i load128(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
static inline __m128i load64(const void *p) { return _mm_loadl_epi64((const __m128i *)p); }

static inline vf vf_load(const float *p) { return vf_make(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
static inline vf vf_set1(float x) { return vf_make(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline vf vf_add(vf x, vf y) { return vf_make(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
static inline vf vf_sub(vf x, vf y) { return vf_make(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
static inline vf vf_div(vf x, vf y) { return vf_make(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
static inline vf vf_min(vf x, vf y) { return vf_make(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
static inline vf vf_mul(vf x, vf y) { return vf_make(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
static inline vf vf_fma(vf x, vf y, vf z)
{
    return vf_make(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
static inline vf vf_max(vf x, vf y) { return vf_make(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
static inline vf vf_abs(vf v)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return vf_make(_mm256_andnot_ps(sign, v.a), _mm256_andnot_ps(sign, v.b));
}
static inline vi vi_round(vf v) { return vi_make(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)); }
static inline vf vf_from_int(vi v) { return vf_make(_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)); }
static inline vf vf_cast(vi v) { return vf_make(_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)); }
static inline vi vi_set1(int x) { return vi_make(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
static inline vi vi_add(vi x, vi y) { return vi_make(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
static inline vi vi_sub(vi x, vi y) { return vi_make(_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)); }
static inline vi vi_mul(vi x, vi y) { return vi_make(_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)); }
static inline vi vi_and(vi x, vi y) { return vi_make(_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)); }
static inline vi vi_shift_right(vi v, int n) { return vi_make(_mm256_srli_epi32(v.a, n), _mm256_srli_epi32(v.b, n)); }
static inline vi vi_shift_left(vi v, int n) { return vi_make(_mm256_slli_epi32(v.a, n), _mm256_slli_epi32(v.b, n)); }
/* v * 2^n in two steps, each within the range of an exponent. */
static inline vf vf_scale_exponent(vf v, vi n)
{
    const vi half = vi_make(_mm256_srai_epi32(n.a, 1), _mm256_srai_epi32(n.b, 1)), bias = vi_set1(127);
    const vf first = vf_cast(vi_shift_left(vi_add(half, bias), 23));
    const vf second = vf_cast(vi_shift_left(vi_add(vi_sub(n, half), bias), 23));
    return vf_mul(vf_mul(v, first), second);
}
static inline vi vi_load_int8(const int8_t *p)
{
    return vi_make(_mm256_cvtepi8_epi32(load64(p)), _mm256_cvtepi8_epi32(load64(p + 8)));
}
static inline void vi_store(uint8_t *p, vi v)
{
    _mm256_storeu_si256((__m256i *)p, v.a), _mm256_storeu_si256((__m256i *)(p + 32), v.b);
}
static inline void vi_narrow(int8_t *p, vi v)
{
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}
static inline void nibble_order(int8_t *p)
{
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128((__m128i *)p, _mm_shuffle_epi8(load128(p), order));
}
static inline vi vi_and_nibbles(vi v) { return vi_and(v, vi_set1(0x0f0f0f0f)); }

static inline vf vf_load_f16(const uint16_t *p)
{
    return vf_make(_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8)));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    return vf_cast(vi_shift_left(vi_make(_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 8))), 16));
}
static inline vf vf_from_nibble(vi v) { return vf_from_int(vi_sub(vi_and(v, vi_set1(15)), vi_set1(8))); }
static inline vf vf_from_byte(vi v) { return vf_from_int(vi_sub(vi_and(v, vi_set1(255)), vi_set1(128))); }

/* Transpose 8 rows of `count` words, with zeros past them, which are not read: the last row may end where its file
 * does. The same bytes of the next panel are asked for on the way. */
static inline void turn8(const uint8_t *const rows[8], int64_t offset, int count, int64_t ahead, __m256i out[8])
{
    __m256i a[8], b[8];
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (int r = 0; r < 8; r++) {
        const uint8_t *at = rows[r] + offset;
        a[r] = count == 8 ? load256(at) : _mm256_maskload_epi32((const int *)at, mask);
        if ((offset & 32) == 0)
            _mm_prefetch((const char *)at + ahead, _MM_HINT_T1);
    }
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 8; r += 4) {
        a[r] = _mm256_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(a[i], a[4 + i], 0x20);
        out[4 + i] = _mm256_permute2x128_si256(a[i], a[4 + i], 0x31);
    }
}

static inline void turn(const uint8_t *const rows[16], int64_t offset, int count, int64_t ahead, vi out[8])
{
    __m256i low[8], high[8];
    turn8(rows, offset, count, ahead, low);
    turn8(rows + 8, offset, count, ahead, high);
    for (int i = 0; i < 8; i++)
        out[i] = vi_make(low[i], high[i]);
}

/* Lanes half a vector apart first, then a quarter, ...: for sums as for maxima. */
static inline float vf_add_lanes(vf v)
{
    const __m256 a = _mm256_add_ps(v.a, v.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline float vf_max_lanes(vf v)
{
    const __m256 a = _mm256_max_ps(v.a, v.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
/* As float16 of 2^-8 times the size, whose exponent is one bit longer. */
static inline vf vf_load_e4m3(const uint8_t *p)
{
    const __m256i code = _mm256_cvtepu8_epi16(load128(p)), most = _mm256_set1_epi16(127);
    const __m256i size = _mm256_and_si256(code, most), sign = _mm256_slli_epi16(_mm256_andnot_si256(most, code), 8);
    const __m256i nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(size, most), 1);
    const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(size, 7), sign), nan);
    const __m256 scale = _mm256_set1_ps(256.0f);
    return vf_make(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale),
                   _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale));
}

static inline __m256i spread(const int8_t *q)
{
    int32_t four;
    __builtin_memcpy(&four, q, 4);
    return _mm256_set1_epi32(four);
}

#if DPBUSD
static inline __attribute__((always_inline)) void dot_bytes(const uint8_t *const *panels, const int8_t *q,
                                                            int64_t width, int quads, int tokens, vi (*sums)[PANELS])
{
    const uint8_t *w = panels[0];
    vi *dot = sums[0];
    for (int t = 0; t < tokens; t++)
        dot[t] = vi_set1(0);
    for (int i = 0; i < quads; i++) {
        const __m256i wa = load256(w + 64 * i), wb = load256(w + 64 * i + 32);
        for (int t = 0; t < tokens; t++) {
            const __m256i a = spread(q + t * width + 4 * i);
            dot[t].a = _mm256_dpbusd_avx_epi32(dot[t].a, wa, a);
            dot[t].b = _mm256_dpbusd_avx_epi32(dot[t].b, wb, a);
        }
    }
}
#define dot_nibbles dot_bytes
#else
/* Eight pairs of 4-bit by 8-bit products fit into 16 bits: 8 * 2 * 15 * 127 = 30480. */
static inline __attribute__((always_inline)) void dot_nibbles(const uint8_t *const *panels, const int8_t *q,
                                                              int64_t width, int quads, int tokens, vi (*sums)[PANELS])
{
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t *w = panels[0];
    vi *dot = sums[0];
    for (int t = 0; t < tokens; t++)
        dot[t] = vi_set1(0);
    for (int first = 0; first < quads; first += 8) {
        const int stop = first + 8 < quads ? first + 8 : quads;
        vi pairs[TILE];
        for (int t = 0; t < tokens; t++)
            pairs[t] = vi_set1(0);
        for (int i = first; i < stop; i++) {
            const __m256i wa = load256(w + 64 * i), wb = load256(w + 64 * i + 32);
            for (int t = 0; t < tokens; t++) {
                const __m256i a = spread(q + t * width + 4 * i);
                pairs[t].a = _mm256_add_epi16(pairs[t].a, _mm256_maddubs_epi16(wa, a));
                pairs[t].b = _mm256_add_epi16(pairs[t].b, _mm256_maddubs_epi16(wb, a));
            }
        }
        for (int t = 0; t < tokens; t++)
            dot[t] = vi_add(dot[t], vi_make(_mm256_madd_epi16(pairs[t].a, ones), _mm256_madd_epi16(pairs[t].b, ones)));
    }
}

/* 8-bit by 8-bit pairs do not fit into 16 bits: widened first, even and odd columns apart. */
static inline __attribute__((always_inline)) void dot_bytes(const uint8_t *const *panels, const int8_t *q,
                                                            int64_t width, int quads, int tokens, vi (*sums)[PANELS])
{
    const vi low = vi_set1(0x00ff00ff);
    const uint8_t *w = panels[0];
    vi *dot = sums[0];
    for (int t = 0; t < tokens; t++)
        dot[t] = vi_set1(0);
    for (int i = 0; i < quads; i++) {
        const vi v = vi_make(load256(w + 64 * i), load256(w + 64 * i + 32));
        const vi even = vi_and(v, low), odd = vi_make(_mm256_srli_epi16(v.a, 8), _mm256_srli_epi16(v.b, 8));
        for (int t = 0; t < tokens; t++) {
            const __m256i a = spread(q + t * width + 4 * i);
            const __m256i a0 = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), a1 = _mm256_srai_epi16(a, 8);
            dot[t].a = _mm256_add_epi32(dot[t].a, _mm256_madd_epi16(even.a, a0));
            dot[t].b = _mm256_add_epi32(dot[t].b, _mm256_madd_epi16(even.b, a0));
            dot[t].a = _mm256_add_epi32(dot[t].a, _mm256_madd_epi16(odd.a, a1));
            dot[t].b = _mm256_add_epi32(dot[t].b, _mm256_madd_epi16(odd.b, a1));
        }
    }
}
#endif

/* One register of a vector, of two. */
typedef __m256 vp;
static inline vp vp_load(const float *p) { return _mm256_loadu_ps(p); }
static inline vp vp_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(load128(p)); }
static inline vp vp_load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}
static inline vp vp_fma(vp x, vp y, vp z) { return _mm256_fmadd_ps(x, y, z); }
#define VP_OF(v, h) ((h) ? &(v).b : &(v).a)
#define HOLD(v) __asm__("" : "+x"(v))
#define TILE_SUMS 6
#define TILE_TOKENS 3
#define ROW_TILES(run) run(3, 2) run(2, 3) run(1, 6) /* tokens by rows of floats: 6 sums in 12 registers */

/* The sums of eight vectors; each halving adds the lanes of two. */
static inline void add_lanes_of_8(const vf *v, float *out)
{
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++) {
        const __m256 p = _mm256_add_ps(v[i].a, v[i].b), q = _mm256_add_ps(v[i + 4].a, v[i + 4].b);
        a[i] = _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
    }
    for (int i = 0; i < 2; i++) {
        const __m256d p = _mm256_castps_pd(a[2 * i]), q = _mm256_castps_pd(a[2 * i + 1]);
        b[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(p, q)), _mm256_castpd_ps(_mm256_unpackhi_pd(p, q)));
    }
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd)));
}

#include "panel.h"
#else
typedef int not_x86;
#endif
