/* Float32 keys or values of tokens to their slots of the cache, in the format of its pages (kv.py). */
#include "program.h"

#include <math.h>
#include <string.h>

#define SMALLEST_NORMAL 0x1p-126f /* the least scale: what divides a row of zeros */
#define TO_INTEGER 12582912.0f    /* 1.5 * 2^23: added and taken away, it rounds to the nearest integer, ties to even */

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The upper half, to nearest, ties to even. */
static uint16_t to_bf16(float x)
{
    const uint32_t bits = bits_of(x);
    if (x != x)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* A finite number beyond the largest becomes the largest. */
static uint16_t to_f16(float x)
{
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x7f800000) /* infinity, NaN */
        return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (size >= 0x477fe000) /* 65504 and more */
        return (uint16_t)(sign | 0x7bff);
    if (size < 0x38800000) /* below 2^-14: a multiple of 2^-24, which is the last place of 0.5 */
        return (uint16_t)(sign | (bits_of(fabsf(x) + 0.5f) - bits_of(0.5f)));
    return (uint16_t)(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}

/* Of a number within the limits of e4m3. */
static uint8_t to_e4m3(float x)
{
    const uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size < 0x3c800000) /* below 2^-6: a multiple of 2^-9, which is the last place of 2^14 */
        return (uint8_t)(sign | (bits_of(fabsf(x) + 0x1p14f) - bits_of(0x1p14f)));
    return (uint8_t)(sign | ((size - 0x3c000000 + 0x7ffff + (size >> 20 & 1)) >> 20));
}

/* The scale that maps the largest magnitude to the largest code; NaN where a number is not finite. */
static float scale_of(const float *x, int64_t dim, float limit)
{
    float largest = 0.0f, poison = 0.0f;
    for (int64_t d = 0; d < dim; d++) {
        largest = fabsf(x[d]) > largest ? fabsf(x[d]) : largest;
        poison += x[d] * 0.0f;
    }
    const float scale = largest / limit;
    return poison != 0.0f ? NAN : scale > SMALLEST_NORMAL ? scale : SMALLEST_NORMAL;
}

static void store_codes(const float *x, int64_t dim, float scale, int type, uint8_t *codes)
{
    const float limit = type == PAGE_INT8 ? 127.0f : 448.0f;
    for (int64_t d = 0; d < dim; d++) {
        float v = x[d] / scale;
        v = v != v ? 0.0f : v > limit ? limit : v < -limit ? -limit : v;
        codes[d] = type == PAGE_INT8 ? (uint8_t)(int8_t)(v + TO_INTEGER - TO_INTEGER) : to_e4m3(v);
    }
}

static void store_row(const StoreCall *c, const float *x, int64_t page, int64_t slot, int64_t head)
{
    const Cache *pages = &c->pages;
    const int64_t at = page * pages->page + slot * pages->slot + head * pages->head;
    void *data = (void *)(uintptr_t)pages->data;
    if (pages->type == PAGE_F32) {
        memcpy((float *)data + at, x, sizeof *x * (size_t)c->dim);
    } else if (pages->type == PAGE_BF16) {
        for (int64_t d = 0; d < c->dim; d++)
            ((uint16_t *)data)[at + d] = to_bf16(x[d]);
    } else if (pages->type == PAGE_F16) {
        for (int64_t d = 0; d < c->dim; d++)
            ((uint16_t *)data)[at + d] = to_f16(x[d]);
    } else {
        float *scale = (float *)(uintptr_t)pages->scales + page * pages->scale_page + slot * pages->scale_slot +
                       head * pages->scale_head;
        if (!c->call.variant) /* a scale for each token */
            *scale = scale_of(x, c->dim, pages->type == PAGE_INT8 ? 127.0f : 448.0f);
        store_codes(x, c->dim, *scale, (int)pages->type, (uint8_t *)data + at);
    }
}

/* A slot below 0 is a row of padding. */
void compress_store(const StoreCall *c)
{
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t h = 0; h < c->heads && c->slots[t] >= 0; h++)
            store_row(c, c->x + t * c->token_stride + h * c->head_stride, c->slots[t] / c->page_size,
                      c->slots[t] % c->page_size, h);
}
