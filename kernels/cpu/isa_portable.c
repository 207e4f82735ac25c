/* Plain C: the definition of what the other files compute, and what Arm runs (the compiler makes NEON of it). */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define KERNELS kernels_portable
#define PANELS 1
#define COLUMNS 4
#define TILE 4
#define QUERY_TILE 4
#define SCORE_LANES 1
#define KEY_TILE 4
#define VALUE_VECTORS(rows) 1
#define TILES(run) run(4) run(1)
#define EACH for (int i = 0; i < 16; i++)

typedef struct { float v[16]; } vf;
typedef struct { int32_t v[16]; } vi;

static inline float f16_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    uint32_t bits;
    if (exponent == 0) { /* zero or subnormal: the fraction in units of 2^-24 */
        const float value = (float)fraction * 0x1p-24f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline vf vf_load(const float *p) { vf v; memcpy(&v, p, 64); return v; }
static inline void vf_store(float *p, vf v) { memcpy(p, &v, 64); }
static inline vf vf_set1(float x) { vf v; EACH v.v[i] = x; return v; }
static inline vf vf_add(vf a, vf b) { EACH a.v[i] += b.v[i]; return a; }
static inline vf vf_sub(vf a, vf b) { EACH a.v[i] -= b.v[i]; return a; }
static inline vf vf_div(vf a, vf b) { EACH a.v[i] /= b.v[i]; return a; }
static inline vf vf_min(vf a, vf b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline vf vf_scale_exponent(vf v, vi n) { EACH v.v[i] = ldexpf(v.v[i], n.v[i]); return v; }
static inline vf vf_mul(vf a, vf b) { EACH a.v[i] *= b.v[i]; return a; }
static inline vf vf_fma(vf a, vf b, vf c) { EACH a.v[i] = fmaf(a.v[i], b.v[i], c.v[i]); return a; }
static inline vf vf_abs(vf v) { EACH v.v[i] = fabsf(v.v[i]); return v; }
static inline vf vf_max(vf a, vf b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline vi vi_round(vf v) { vi out; EACH out.v[i] = (int32_t)rintf(v.v[i]); return out; }
static inline vf vf_from_int(vi v) { vf out; EACH out.v[i] = (float)v.v[i]; return out; }
static inline vf vf_load_f16(const uint16_t *p) { vf v; EACH v.v[i] = f16_to_float(p[i]); return v; }
static inline vf vf_load_bf16(const uint16_t *p) { vf v; EACH v.v[i] = float_of_bits((uint32_t)p[i] << 16); return v; }
static inline vf vf_from_nibble(vi v) { vf out; EACH out.v[i] = (float)((v.v[i] & 15) - 8); return out; }
static inline vf vf_from_byte(vi v) { vf out; EACH out.v[i] = (float)((v.v[i] & 255) - 128); return out; }

static inline vi vi_set1(int x) { vi v; EACH v.v[i] = x; return v; }
static inline vi vi_add(vi a, vi b) { EACH a.v[i] += b.v[i]; return a; }
static inline vi vi_sub(vi a, vi b) { EACH a.v[i] -= b.v[i]; return a; }
static inline vi vi_mul(vi a, vi b) { EACH a.v[i] *= b.v[i]; return a; }
static inline vi vi_load_int8(const int8_t *p) { vi v; EACH v.v[i] = p[i]; return v; }
static inline void vi_store(uint8_t *p, vi v) { memcpy(p, &v, 64); }
static inline void vi_narrow(int8_t *p, vi v) { EACH p[i] = (int8_t)v.v[i]; }
static inline void nibble_order(int8_t *p)
{
    static const int order[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    int8_t old[16];
    memcpy(old, p, 16);
    EACH p[i] = old[order[i]];
}
static inline vi vi_and_nibbles(vi v) { EACH v.v[i] &= 0x0f0f0f0f; return v; }
static inline vi vi_shift_right(vi v, int bits) { EACH v.v[i] = (int32_t)((uint32_t)v.v[i] >> bits); return v; }

static inline void turn(const uint8_t *const rows[16], int64_t offset, int count, int64_t ahead, vi out[COLUMNS])
{
    (void)ahead;
    memset(out, 0, COLUMNS * sizeof *out);
    for (int c = 0; c < count; c++)
        EACH memcpy(&out[c].v[i], rows[i] + offset + 4 * c, 4);
}

/* Lanes half a vector apart first, then a quarter, ...: for sums as for maxima. */
static inline float vf_add_lanes(vf v)
{
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++)
            v.v[i] += v.v[i + width];
    return v.v[0];
}
static inline float vf_max_lanes(vf v)
{
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++)
            v.v[i] = v.v[i] > v.v[i + width] ? v.v[i] : v.v[i + width];
    return v.v[0];
}
/* As float16 of 2^-8 times the size, whose exponent is one bit longer. */
static inline vf vf_load_e4m3(const uint8_t *p)
{
    vf v;
    EACH v.v[i] = f16_to_float((uint16_t)((p[i] & 127) << 7 | (p[i] & 128) << 8 | ((p[i] & 127) == 127 ? 0x7fff : 0))) *
                  256.0f;
    return v;
}

static inline void dot_bytes(const uint8_t *const *w, const int8_t *q, int64_t width, int quads, int tokens,
                             vi (*dot)[PANELS])
{
    for (int t = 0; t < tokens; t++) {
        vi sum = vi_set1(0);
        for (int j = 0; j < quads; j++) {
            const int8_t *a = q + t * width + 4 * j;
            const uint8_t *b = w[0] + 64 * j;
            EACH sum.v[i] += b[4 * i] * a[0] + b[4 * i + 1] * a[1] + b[4 * i + 2] * a[2] + b[4 * i + 3] * a[3];
        }
        dot[t][0] = sum;
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
#define HOLD(v)
#define TILE_SUMS 6
#define TILE_TOKENS 3
#define ROW_TILES(run) run(3, 2) run(2, 3) run(1, 6) /* tokens by rows of floats */

static inline void add_lanes_of_8(const vf *v, float *out)
{
    for (int i = 0; i < 8; i++) {
        vf sum = v[i];
        for (int width = 8; width; width /= 2)
            for (int j = 0; j < width; j++)
                sum.v[j] += sum.v[j + width];
        out[i] = sum.v[0];
    }
}

#include "panel.h"
