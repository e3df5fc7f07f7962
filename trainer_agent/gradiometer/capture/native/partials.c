/* Partial statistics of many gradients, each read from memory once; `statistics.exact` in Python is the definition.
 *
 * Called through ctypes with tables of pointers, so it knows neither Python nor torch and fits every version of both.
 * It allocates nothing, remembers nothing between calls, starts no thread and needs no libm. One thread is enough,
 * because the pass waits for memory and not for arithmetic.
 *
 * float32 is added up in float over 256 elements, then in double: exact to about 1e-7. A block whose float sum of
 * squares overflowed, underflowed or is not finite is looked at again in double while it is still in the cache.
 *
 * build.py compiles this. Never with -ffast-math: linking with it makes the whole process flush subnormal numbers
 * to zero, and comparisons with NaN would mean nothing any more.
 */

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAS_AVX2_PATH 1
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#define ABI 2      /* Another signature or meaning: another number, here and in the loader. */
#define BLOCK 4096 /* Elements looked at together; as floats half of a small first-level cache. */
#define LANES 16   /* Independent accumulators: what lets a compiler use vector registers without -ffast-math. */
#define TURNS 16   /* Additions of one lane in its own type before it is folded into double. */
#define NUM_BINS 256
#define AHEAD 8192 /* Bytes: two pages. The processor's own prefetcher begins anew at the border of each page. */
#define MIN_MEAN_SQUARE 1e-30 /* Below, squares that float32 loses (under 1.2e-38) could be seen in the result. */

enum { COUNT, SUM, SUM_SQUARES, MIN, MAX, NUM_ZEROS, NUM_NONFINITE, WIDTH };
enum { NORM_COUNT, NORM_SUM_SQUARES, NORM_NUM_NONFINITE, NORM_WIDTH };
enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum { FASTEST, PORTABLE };

/* Prefetch what will be read after AHEAD bytes: a fifth faster from memory. Beyond the end of a tensor, or of the
 * buffer of a half-precision block, it is a hint to no effect (which costs those a tenth). */
INLINE void look_ahead(const void *here, size_t num_bytes)
{
    for (size_t b = 0; b < num_bytes; b += 64)
        __builtin_prefetch((const char *)here + AHEAD + b);
}

/* min and max of the elements that are not NaN. */
typedef struct {
    double sum, sum_squares, min, max;
    int64_t num_zeros;
} Partial;

/* ---- one block, in one type: the bodies, compiled below for the baseline and for AVX2 ------------------------------ */

/* A comparison with NaN is false, so that NaN leaves low and high alone. */
#define DEFINE_SUMMARY(name, element, accumulator, counter)                                                           \
    INLINE void name(const element *x, int64_t n, Partial *out)                                                       \
    {                                                                                                                 \
        double sum[LANES] = {0}, squares[LANES] = {0};                                                                \
        element low[LANES], high[LANES];                                                                              \
        counter zeros[LANES] = {0};                                                                                   \
        for (int k = 0; k < LANES; k++)                                                                               \
            low[k] = (element)__builtin_inf(), high[k] = (element)-__builtin_inf();                                   \
        int64_t i = 0;                                                                                                \
        while (i + LANES <= n) {                                                                                      \
            accumulator part_sum[LANES] = {0}, part_squares[LANES] = {0};                                             \
            const int64_t end = n - i < LANES * TURNS ? n - LANES : i + LANES * (TURNS - 1);                          \
            for (; i <= end; i += LANES) {                                                                            \
                look_ahead(x + i, LANES * sizeof(element));                                                           \
                for (int k = 0; k < LANES; k++) {                                                                     \
                    const element value = x[i + k];                                                                   \
                    part_sum[k] += (accumulator)value;                                                                \
                    part_squares[k] += (accumulator)value * (accumulator)value;                                       \
                    low[k] = value < low[k] ? value : low[k];                                                         \
                    high[k] = value > high[k] ? value : high[k];                                                      \
                    zeros[k] += value == 0;                                                                           \
                }                                                                                                     \
            }                                                                                                         \
            for (int k = 0; k < LANES; k++)                                                                           \
                sum[k] += (double)part_sum[k], squares[k] += (double)part_squares[k];                                 \
        }                                                                                                             \
        Partial all = {0, 0, __builtin_inf(), -__builtin_inf(), 0};                                                   \
        for (int k = 0; k < LANES; k++) {                                                                             \
            all.sum += sum[k], all.sum_squares += squares[k], all.num_zeros += zeros[k];                              \
            all.min = low[k] < all.min ? low[k] : all.min, all.max = high[k] > all.max ? high[k] : all.max;           \
        }                                                                                                             \
        for (; i < n; i++) {                                                                                          \
            const double value = (double)x[i];                                                                        \
            all.sum += value, all.sum_squares += value * value, all.num_zeros += value == 0;                          \
            all.min = value < all.min ? value : all.min, all.max = value > all.max ? value : all.max;                 \
        }                                                                                                             \
        *out = all;                                                                                                   \
    }

#define DEFINE_SQUARES(name, element, accumulator)                                                                    \
    INLINE double name(const element *x, int64_t n)                                                                   \
    {                                                                                                                 \
        double squares[LANES] = {0}, all = 0;                                                                         \
        int64_t i = 0;                                                                                                \
        while (i + LANES <= n) {                                                                                      \
            accumulator part[LANES] = {0};                                                                            \
            const int64_t end = n - i < LANES * TURNS ? n - LANES : i + LANES * (TURNS - 1);                          \
            for (; i <= end; i += LANES) {                                                                            \
                look_ahead(x + i, LANES * sizeof(element));                                                           \
                for (int k = 0; k < LANES; k++)                                                                       \
                    part[k] += (accumulator)x[i + k] * (accumulator)x[i + k];                                         \
            }                                                                                                         \
            for (int k = 0; k < LANES; k++)                                                                           \
                squares[k] += (double)part[k];                                                                        \
        }                                                                                                             \
        for (int k = 0; k < LANES; k++)                                                                               \
            all += squares[k];                                                                                        \
        for (; i < n; i++)                                                                                            \
            all += (double)x[i] * (double)x[i];                                                                       \
        return all;                                                                                                   \
    }

#define DEFINE_NONFINITE(name, element)                                                                               \
    static int64_t name(const element *x, int64_t n)                                                                  \
    {                                                                                                                 \
        int64_t count = 0;                                                                                            \
        for (int64_t i = 0; i < n; i++)                                                                               \
            count += !(x[i] - x[i] == 0);                                                                             \
        return count;                                                                                                 \
    }

DEFINE_SUMMARY(summary_f32, float, float, int32_t)
DEFINE_SUMMARY(wide_summary_f32, float, double, int32_t)
DEFINE_SUMMARY(summary_f64, double, double, int64_t)
DEFINE_SQUARES(squares_f32, float, float)
DEFINE_SQUARES(wide_squares_f32, float, double)
DEFINE_SQUARES(squares_f64, double, double)
DEFINE_NONFINITE(nonfinite_f32, float)
DEFINE_NONFINITE(nonfinite_f64, double)

/* Whether some element is not finite, that is, has an exponent of ones only: one more in its lowest bit carries into the
 * sign. Integers, so that the baseline compiles to vector instructions too and a signalling NaN signals nothing. */
#define DEFINE_ANY_NONFINITE(name, bits, exponent, lowest)                                                            \
    INLINE int name(const bits *x, int64_t n)                                                                         \
    {                                                                                                                 \
        enum { WIDE = 128 / sizeof(bits) };                                                                           \
        bits seen[WIDE] = {0}, all = 0;                                                                               \
        int64_t i = 0;                                                                                                \
        for (; i + WIDE <= n; i += WIDE) {                                                                            \
            look_ahead(x + i, WIDE * sizeof(bits));                                                                   \
            for (int k = 0; k < WIDE; k++)                                                                            \
                seen[k] |= (bits)((x[i + k] & (exponent)) + (lowest));                                                \
        }                                                                                                             \
        for (; i < n; i++)                                                                                            \
            all |= (bits)((x[i] & (exponent)) + (lowest));                                                            \
        for (int k = 0; k < WIDE; k++)                                                                                \
            all |= seen[k];                                                                                           \
        return (int)(all >> (8 * sizeof(bits) - 1));                                                                  \
    }

DEFINE_ANY_NONFINITE(any_nonfinite_f32, uint32_t, 0x7f800000u, 0x00800000u)
DEFINE_ANY_NONFINITE(any_nonfinite_f64, uint64_t, 0x7ff0000000000000u, 0x0010000000000000u)
DEFINE_ANY_NONFINITE(any_nonfinite_f16, uint16_t, 0x7c00u, 0x0400u)
DEFINE_ANY_NONFINITE(any_nonfinite_bf16, uint16_t, 0x7f80u, 0x0080u)

INLINE int any_nonfinite(const void *x, int64_t n, int32_t dtype)
{
    switch (dtype) {
    case FLOAT32:
        return any_nonfinite_f32(x, n);
    case FLOAT64:
        return any_nonfinite_f64(x, n);
    case FLOAT16:
        return any_nonfinite_f16(x, n);
    default:
        return any_nonfinite_bf16(x, n);
    }
}

/* Both conversions are exact: every bfloat16 and every float16 is a float32. */
INLINE void widen_bfloat16(const uint16_t *from, int64_t n, float *to)
{
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        __builtin_memcpy(&to[i], &bits, sizeof bits);
    }
}

INLINE void widen_float16(const uint16_t *from, int64_t n, float *to)
{
    for (int64_t i = 0; i < n; i++) {
        const uint32_t sign = (uint32_t)(from[i] & 0x8000u) << 16, magnitude = from[i] & 0x7fffu;
        /* The bias of the exponent differs by 112; infinities and NaN have the largest exponent in both. */
        uint32_t bits = (magnitude << 13) + (magnitude < 0x7c00u ? 112u << 23 : 224u << 23);
        /* A subnormal float16 m is m * 2**-24: put m behind 0.5 and take the 0.5 away again. */
        const uint32_t beside_half = magnitude | 0x3f000000u;
        float small;
        __builtin_memcpy(&small, &beside_half, sizeof small);
        small -= 0.5f;
        uint32_t small_bits;
        __builtin_memcpy(&small_bits, &small, sizeof small_bits);
        bits = (magnitude < 0x400u ? small_bits : bits) | sign;
        __builtin_memcpy(&to[i], &bits, sizeof bits);
    }
}

#ifdef HAS_AVX2_PATH
AVX2 INLINE void f16c_widen_float16(const uint16_t *from, int64_t n, float *to)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    widen_float16(from + i, n - i, to + i);
}
#endif

/* ---- the two sets of functions --------------------------------------------------------------------------------- */

typedef struct {
    void (*summary_f32)(const float *, int64_t, Partial *);
    void (*wide_summary_f32)(const float *, int64_t, Partial *);
    void (*summary_f64)(const double *, int64_t, Partial *);
    double (*squares_f32)(const float *, int64_t);
    double (*wide_squares_f32)(const float *, int64_t);
    double (*squares_f64)(const double *, int64_t);
    void (*widen_bfloat16)(const uint16_t *, int64_t, float *);
    void (*widen_float16)(const uint16_t *, int64_t, float *);
    int (*any_nonfinite)(const void *, int64_t, int32_t);
} Functions;

#define DEFINE_FUNCTIONS(prefix, attributes, half)                                                                     \
    attributes static void prefix##_sum32(const float *x, int64_t n, Partial *p) { summary_f32(x, n, p); }            \
    attributes static void prefix##_wide32(const float *x, int64_t n, Partial *p) { wide_summary_f32(x, n, p); }      \
    attributes static void prefix##_sum64(const double *x, int64_t n, Partial *p) { summary_f64(x, n, p); }           \
    attributes static double prefix##_squares32(const float *x, int64_t n) { return squares_f32(x, n); }              \
    attributes static double prefix##_wide_squares32(const float *x, int64_t n) { return wide_squares_f32(x, n); }    \
    attributes static double prefix##_squares64(const double *x, int64_t n) { return squares_f64(x, n); }             \
    attributes static void prefix##_bf16(const uint16_t *x, int64_t n, float *to) { widen_bfloat16(x, n, to); }       \
    attributes static void prefix##_f16(const uint16_t *x, int64_t n, float *to) { half(x, n, to); }                  \
    attributes static int prefix##_any(const void *x, int64_t n, int32_t d) { return any_nonfinite(x, n, d); }        \
    static const Functions prefix##_functions = {prefix##_sum32,     prefix##_wide32,         prefix##_sum64,         \
                                                 prefix##_squares32, prefix##_wide_squares32, prefix##_squares64,     \
                                                 prefix##_bf16,      prefix##_f16,            prefix##_any};

DEFINE_FUNCTIONS(portable, , widen_float16)
#ifdef HAS_AVX2_PATH
DEFINE_FUNCTIONS(avx2, AVX2, f16c_widen_float16)
#endif

#ifdef HAS_AVX2_PATH
/* AVX2, FMA and F16C, and a system that saves their registers. Asked of the processor itself: a compiler's
 * __builtin_cpu_supports needs its run-time library, and not every compiler's knows all three. */
static int has_avx2(void)
{
    enum { AVX = 1 << 28, OSXSAVE = 1 << 27, BASICS = bit_FMA | bit_F16C | AVX | OSXSAVE, XMM_AND_YMM = 6 };
    unsigned int a, b, c, d, enabled, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & BASICS) != BASICS)
        return 0;
    __asm__("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
    if ((enabled & XMM_AND_YMM) != XMM_AND_YMM)
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#endif

/* Chosen while the library is loaded and never again: under a hypervisor the processor's answers take microseconds. */
static const Functions *fastest = &portable_functions;

__attribute__((constructor)) static void choose(void)
{
#ifdef HAS_AVX2_PATH
    if (has_avx2())
        fastest = &avx2_functions;
#endif
}

static const Functions *functions(int32_t path)
{
    return path == PORTABLE ? &portable_functions : fastest;
}

/* ---- whole gradients ------------------------------------------------------------------------------------------- */

static int is_finite(double x)
{
    return x - x == 0;
}

static int64_t size_of(int32_t dtype)
{
    return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2;
}

/* The floats of a block; those of a half-precision one in `buffer`. */
static const float *as_floats(const Functions *f, const void *block, int64_t n, int32_t dtype, float *buffer)
{
    if (dtype == FLOAT32)
        return block;
    (dtype == FLOAT16 ? f->widen_float16 : f->widen_bfloat16)(block, n, buffer);
    return buffer;
}

/* float32 is enough if nothing overflowed (which NaN and infinities do too) and nothing was lost at the small end. */
static int is_enough(double sum_squares, int64_t num_nonzero)
{
    return sum_squares <= 3e38 && sum_squares >= MIN_MEAN_SQUARE * (double)num_nonzero;
}

static void add_block_f32(const Functions *f, const float *x, int64_t n, double *row, Partial *block)
{
    f->summary_f32(x, n, block);
    if (!is_enough(block->sum_squares, n - block->num_zeros)) {
        f->wide_summary_f32(x, n, block);
        row[NUM_NONFINITE] += (double)nonfinite_f32(x, n);
    }
}

static void add_block_f64(const Functions *f, const double *x, int64_t n, double *row, Partial *block)
{
    f->summary_f64(x, n, block);
    if (!is_finite(block->sum_squares))
        row[NUM_NONFINITE] += (double)nonfinite_f64(x, n);
}

static void add_block(const Functions *f, const void *x, int64_t n, int32_t dtype, double *row)
{
    float buffer[BLOCK];
    Partial block;
    if (dtype == FLOAT64)
        add_block_f64(f, x, n, row, &block);
    else
        add_block_f32(f, as_floats(f, x, n, dtype, buffer), n, row, &block);
    row[SUM] += block.sum;
    row[SUM_SQUARES] += block.sum_squares;
    row[MIN] = block.min < row[MIN] ? block.min : row[MIN];
    row[MAX] = block.max > row[MAX] ? block.max : row[MAX];
    row[NUM_ZEROS] += (double)block.num_zeros;
}

/* The bin of an element is the exponent field of the float32 nearest towards zero; see native/__init__.py. */
static void add_bins(const Functions *f, const void *x, int64_t n, int32_t dtype, uint64_t *bins)
{
    float buffer[BLOCK];
    /* Four tables, so that equal neighbours do not wait for each other's store. */
    uint32_t count[4][NUM_BINS] = {{0}};
    if (dtype == FLOAT64) {
        const double *values = x;
        for (int64_t i = 0; i < n; i++) {
            uint64_t bits;
            __builtin_memcpy(&bits, &values[i], sizeof bits);
            const int32_t exponent = (int32_t)((bits >> 52) & 2047);
            const int32_t shifted = exponent - 1023 + 127;
            count[i & 3][exponent == 2047 ? 255 : shifted < 0 ? 0 : shifted > 254 ? 254 : shifted]++;
        }
    } else {
        const float *values = as_floats(f, x, n, dtype, buffer);
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) {
            uint32_t bits[4];
            __builtin_memcpy(bits, &values[i], sizeof bits);
            for (int k = 0; k < 4; k++)
                count[k][(bits[k] >> 23) & 255]++;
        }
        for (; i < n; i++) {
            uint32_t bits;
            __builtin_memcpy(&bits, &values[i], sizeof bits);
            count[0][(bits >> 23) & 255]++;
        }
    }
    for (int k = 0; k < NUM_BINS; k++)
        bins[k] += (uint64_t)count[0][k] + count[1][k] + count[2][k] + count[3][k];
}

static const void *at(const void *data, int64_t element, int32_t dtype)
{
    return (const char *)data + element * size_of(dtype);
}

/* ---- what is exported ------------------------------------------------------------------------------------------ */

EXPORT int32_t gradiometer_abi(void)
{
    return ABI;
}

/* 1 if the AVX2 functions are what `path` FASTEST uses on this machine. */
EXPORT int32_t gradiometer_uses_avx2(void)
{
    return functions(FASTEST) != &portable_functions;
}

/* num: gradients; data, lengths (elements), dtypes: their tables; rows: num x WIDTH, written completely. */
EXPORT void gradiometer_partials(int64_t num, const void *const *data, const int64_t *lengths, const int32_t *dtypes,
                                 int32_t path, double *rows)
{
    const Functions *f = functions(path);
    for (int64_t g = 0; g < num; g++) {
        double *row = rows + g * WIDTH;
        for (int k = 0; k < WIDTH; k++)
            row[k] = 0;
        if (lengths[g] == 0)
            continue;
        row[COUNT] = (double)lengths[g], row[MIN] = __builtin_inf(), row[MAX] = -__builtin_inf();
        for (int64_t i = 0; i < lengths[g]; i += BLOCK) {
            const int64_t n = lengths[g] - i < BLOCK ? lengths[g] - i : BLOCK;
            add_block(f, at(data[g], i, dtypes[g]), n, dtypes[g], row);
        }
        /* Squares are never negative, so only a NaN among the elements makes their sum NaN. */
        if (row[SUM_SQUARES] != row[SUM_SQUARES])
            row[MIN] = row[MAX] = row[SUM_SQUARES];
    }
}

/* As above; rows: num x NORM_WIDTH. Non-finite elements are counted only where the sum of squares is not finite. */
EXPORT void gradiometer_norms(int64_t num, const void *const *data, const int64_t *lengths, const int32_t *dtypes,
                              int32_t path, double *rows)
{
    const Functions *f = functions(path);
    float buffer[BLOCK];
    for (int64_t g = 0; g < num; g++) {
        double *row = rows + g * NORM_WIDTH;
        row[NORM_COUNT] = (double)lengths[g], row[NORM_SUM_SQUARES] = row[NORM_NUM_NONFINITE] = 0;
        for (int64_t i = 0; i < lengths[g]; i += BLOCK) {
            const int64_t n = lengths[g] - i < BLOCK ? lengths[g] - i : BLOCK;
            const void *block = at(data[g], i, dtypes[g]);
            double squares;
            if (dtypes[g] == FLOAT64) {
                squares = f->squares_f64(block, n);
                if (!is_finite(squares))
                    row[NORM_NUM_NONFINITE] += (double)nonfinite_f64(block, n);
            } else {
                const float *x = as_floats(f, block, n, dtypes[g], buffer);
                squares = f->squares_f32(x, n);
                if (!is_enough(squares, n)) {
                    squares = f->wide_squares_f32(x, n);
                    row[NORM_NUM_NONFINITE] += is_finite(squares) ? 0 : (double)nonfinite_f32(x, n);
                }
            }
            row[NORM_SUM_SQUARES] += squares;
        }
    }
}

/* As above; bins: num x NUM_BINS, written completely. Only every `every`-th block of BLOCK elements is counted. */
EXPORT void gradiometer_histograms(int64_t num, const void *const *data, const int64_t *lengths, const int32_t *dtypes,
                                   int32_t path, int64_t every, uint64_t *bins)
{
    const Functions *f = functions(path);
    for (int64_t g = 0; g < num; g++) {
        for (int k = 0; k < NUM_BINS; k++)
            bins[g * NUM_BINS + k] = 0;
        for (int64_t i = 0; i < lengths[g]; i += BLOCK * every) {
            const int64_t n = lengths[g] - i < BLOCK ? lengths[g] - i : BLOCK;
            add_bins(f, at(data[g], i, dtypes[g]), n, dtypes[g], bins + g * NUM_BINS);
        }
    }
}

/* 1 if one of `length` elements is NaN or an infinity, else 0; reads no further than the block that has the first. */
EXPORT int32_t gradiometer_any_nonfinite(const void *data, int64_t length, int32_t dtype, int32_t path)
{
    const Functions *f = functions(path);
    for (int64_t i = 0; i < length; i += BLOCK) {
        const int64_t n = length - i < BLOCK ? length - i : BLOCK;
        if (f->any_nonfinite(at(data, i, dtype), n, dtype))
            return 1;
    }
    return 0;
}
