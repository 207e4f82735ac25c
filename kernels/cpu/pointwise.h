/* Exponentials, norms and gates on 16 lanes: included after the vector operations of an instruction set. */
#include "pointwise_rows.h"

/* e^x to 2 units in the last place: 2^n times a polynomial in the remainder (Cephes' expf); 0 below 2^-126, infinity
 * above the range, NaN kept. */
static inline vf vf_exp(vf x)
{
    /* a NaN is the second argument of both, which they return */
    const vf clamped = vf_min(vf_set1(89.0f), vf_max(vf_set1(-104.0f), x));
    const vi n = vi_round(vf_mul(clamped, vf_set1(1.44269504088896341f)));
    const vf whole = vf_from_int(n);
    vf r = vf_fma(whole, vf_set1(-0.693359375f), clamped);
    r = vf_fma(whole, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(vf_mul(p, r), r, vf_add(r, vf_set1(1.0f)));
    return vf_scale_exponent(p, n);
}

static inline float add_lanes(vf v)
{
    float lanes[ROWS], sum = 0.0f;
    vf_store(lanes, v);
    for (int width = ROWS / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    sum = lanes[0];
    return sum;
}

/* x / sqrt(mean(x^2) + eps) * weight, after x += residual where there is one; count is a multiple of 16. */
static void norm_row(const float *x, const float *residual, float *total, const float *weight, float *out,
                     int64_t count, float eps, int unit_offset)
{
    vf squares = vf_set1(0.0f);
    for (int64_t i = 0; i < count; i += ROWS) {
        vf v = vf_load(x + i);
        if (residual) {
            v = vf_add(v, vf_load(residual + i));
            vf_store(total + i, v);
        }
        squares = vf_fma(v, v, squares);
    }
    const float *source = residual ? total : x;
    const vf inverse = vf_set1(1.0f / sqrtf(add_lanes(squares) / (float)count + eps));
    for (int64_t i = 0; i < count; i += ROWS) {
        const vf w = unit_offset ? vf_add(vf_set1(1.0f), vf_load(weight + i)) : vf_load(weight + i);
        vf_store(out + i, vf_mul(w, vf_mul(vf_load(source + i), inverse)));
    }
}

static inline vf sigmoid(vf x)
{
    const vf one = vf_set1(1.0f);
    return vf_div(one, vf_add(one, vf_exp(vf_sub(vf_set1(0.0f), x))));
}

/* gate(x[0:count]) * x[count:]; GELU by tanh is x * sigmoid(2 y). count is a multiple of 16. */
static void gate_row(const float *x, float *out, int64_t count, int gelu)
{
    for (int64_t i = 0; i < count; i += ROWS) {
        const vf v = vf_load(x + i);
        vf y = v;
        if (gelu) {
            const vf cube = vf_mul(vf_mul(v, v), v);
            y = vf_mul(vf_fma(cube, vf_set1(0.044715f), v), vf_set1(1.5957691216057308f)); /* 2 sqrt(2 / pi) */
        }
        vf_store(out + i, vf_mul(vf_mul(v, sigmoid(y)), vf_load(x + count + i)));
    }
}
