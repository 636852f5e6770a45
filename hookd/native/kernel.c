/* All statistics of a tensor in one pass over its memory. Plain C without any library, so that one file works with
 * every Python and can be loaded from memory. It is called through ctypes, without the GIL, and keeps no state.
 *
 * A tensor is read in blocks. The elements of a block are summed about the mean of the previous block, so a mean of
 * 1000 with a spread of 1 loses no precision. Nor does a difference between the blocks' means, because it is part of
 * the tensor's own spread. The first block is summed about the mean of its first elements. The blocks are combined in
 * double precision: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
 * 1979, 2.1. An element that is not finite shows in its block's sum; only such a block is examined element by element.
 *
 * Every loop over a block runs in independent lanes, as many as fit in two registers, so that the compiler can
 * vectorize it as it stands, without permission to reorder sums. It does so for three instruction sets.
 */
#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BLOCK = 2048, SAMPLE = 256 };
enum { F32, F64, F16, BF16 }; /* dtype */
enum { COUNT, MEAN, SQUARES, MIN, MAX, ZEROS, NANS, INFS, NEGATIVE_INFS, SHIFT, FIELDS };
/* COUNT: number of finite elements; MEAN to MAX are of these, too. SQUARES: sum of their squared differences from the
 * mean. SHIFT: the last block's mean. */

#define INF __builtin_inf()
#define EXPORTED __attribute__((visibility("default")))

typedef uint32_t __attribute__((may_alias, aligned(2))) Pair; /* two 16-bit elements */

typedef struct { /* of a block: the sums of the elements' differences from `shift` and of the squares of these, and the other statistics */
    double sum, squares, min, max, zeros, shift;
} Block;

typedef struct { /* functions for one instruction set */
    void (*f32)(const float *, int, double, Block *);
    void (*f64)(const double *, int, double, Block *);
    void (*half)(const uint16_t *, int, float *);
    void (*brain)(const uint16_t *, int, float *);
    uint64_t (*most_16)(const void *, int);
    uint64_t (*most_32)(const void *, int);
    uint64_t (*most_64)(const void *, int);
} Set;

static inline uint32_t bits_of(float x) {
    union { float f; uint32_t u; } both = {x};
    return both.u;
}

static inline float from_bits(uint32_t u) {
    union { uint32_t u; float f; } both = {u};
    return both.f;
}

/* gcc 12 unrolls loops of up to eight lanes before it vectorizes, and then finds nothing to vectorize: four times
 * slower. */
#define LANES _Pragma("GCC unroll 1")

/* Sum n elements, finite or not, about `shift`. */
#define FOLD(set, with, name, type, integer, lanes)                                                                   \
    with static void name##_##set(const type *restrict x, int n, double about, Block *b) {                            \
        type sum[lanes], low[lanes], high[lanes], square[lanes], shift = (type)about;                                 \
        integer zero[lanes];                                                                                          \
        for (int j = 0; j < lanes; j++)                                                                               \
            sum[j] = square[j] = 0, zero[j] = 0, low[j] = (type)INF, high[j] = (type)-INF;                            \
        int whole = n - n % lanes;                                                                                    \
        for (int i = 0; i < whole; i += lanes)                                                                        \
            LANES for (int j = 0; j < lanes; j++) {                                                                   \
                type v = x[i + j], d = v - shift;                                                                     \
                sum[j] += d;                                                                                          \
                square[j] += d * d;                                                                                   \
                low[j] = v < low[j] ? v : low[j];                                                                     \
                high[j] = v > high[j] ? v : high[j];                                                                  \
                zero[j] = v == 0 ? zero[j] + 1 : zero[j];                                                             \
            }                                                                                                         \
        for (int i = whole, j = 0; i < n; i++, j++) {                                                                 \
            type v = x[i], d = v - shift;                                                                             \
            sum[j] += d;                                                                                              \
            square[j] += d * d;                                                                                       \
            low[j] = v < low[j] ? v : low[j];                                                                         \
            high[j] = v > high[j] ? v : high[j];                                                                      \
            zero[j] += v == 0;                                                                                        \
        }                                                                                                             \
        Block all = {0, 0, INF, -INF, 0, shift};                                                                      \
        for (int j = 0; j < lanes; j++) {                                                                             \
            all.sum += sum[j], all.squares += square[j], all.zeros += (double)zero[j];                                \
            all.min = low[j] < all.min ? low[j] : all.min;                                                            \
            all.max = high[j] > all.max ? high[j] : all.max;                                                          \
        }                                                                                                             \
        *b = all;                                                                                                     \
    }

/* Convert in pairs, which fills a register at once; the order of the elements does not matter. */
#define BRAIN(set, with)                                                                                              \
    with static void brain_##set(const uint16_t *restrict x, int n, float *restrict to) {                             \
        const Pair *restrict pairs = (const Pair *)(const void *)x;                                                   \
        float *restrict odd = to + n / 2;                                                                             \
        for (int i = 0; i < n / 2; i++) {                                                                             \
            to[i] = from_bits(pairs[i] << 16);                                                                        \
            odd[i] = from_bits(pairs[i] & 0xffff0000u);                                                               \
        }                                                                                                             \
        if (n % 2)                                                                                                    \
            to[n - 1] = from_bits((uint32_t)x[n - 1] << 16);                                                          \
    }

/* Exact for denormals too. A magnitude beyond 65504 is an infinity or NaN and keeps its bits. */
static void half_plain(const uint16_t *restrict x, int n, float *restrict to) {
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = x[i] & 0x7fffu, sign = (x[i] & 0x8000u) << 16;
        uint32_t finite = bits_of(from_bits(magnitude << 13) * 0x1p112f);
        to[i] = from_bits(sign | finite | (magnitude >= 0x7c00u ? 0x7f800000u : 0));
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) static void half_avx2(const uint16_t *restrict x, int n, float *restrict to) {
    int i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    half_plain(x + i, n - i, to + i);
}

__attribute__((target("avx512f"))) static void half_avx512(const uint16_t *restrict x, int n, float *restrict to) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
    half_plain(x + i, n - i, to + i);
}
#endif

/* The largest magnitude, as bits. Read as integers, magnitudes keep their order, and infinity and NaN are the largest. */
#define MOST(set, with, bits, type, lanes)                                                                            \
    with static uint64_t most_##bits##_##set(const void *memory, int n) {                                              \
        const type *restrict x = memory, magnitude = (type)(~(uint64_t)0 >> (65 - bits));                             \
        type most[lanes] = {0};                                                                                       \
        int whole = n - n % lanes;                                                                                    \
        for (int i = 0; i < whole; i += lanes)                                                                        \
            for (int j = 0; j < lanes; j++) {                                                                         \
                type m = x[i + j] & magnitude;                                                                        \
                most[j] = m > most[j] ? m : most[j];                                                                  \
            }                                                                                                         \
        for (int i = whole, j = 0; i < n; i++, j++) {                                                                 \
            type m = x[i] & magnitude;                                                                                \
            most[j] = m > most[j] ? m : most[j];                                                                      \
        }                                                                                                             \
        for (int j = 0; j < lanes; j++)                                                                               \
            most[0] = most[j] > most[0] ? most[j] : most[0];                                                          \
        return (uint64_t)most[0];                                                                                     \
    }

#define SET(set, with, bytes)                                                                                         \
    FOLD(set, with, f32, float, int32_t, (bytes / 2))                                                                 \
    FOLD(set, with, f64, double, int64_t, (bytes / 4))                                                                \
    BRAIN(set, with)                                                                                                  \
    MOST(set, with, 16, int16_t, (2 * bytes))                                                                         \
    MOST(set, with, 32, int32_t, bytes)                                                                               \
    MOST(set, with, 64, int64_t, (bytes / 2))                                                                         \
    static const Set set = {f32_##set,     f64_##set,     half_##set,   brain_##set,                                  \
                            most_16_##set, most_32_##set, most_64_##set};

SET(plain, , 16)
#if defined(__x86_64__)
SET(avx2, __attribute__((target("avx2,fma"))), 32)
SET(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))), 64)
#endif

/* Whether -inf is the only value that is not finite: no magnitude is above infinity (a NaN), and no value equals +inf. */
#define MASKED(bits, unsigned_type)                                                                                   \
    static int masked_##bits(const void *memory, int n, uint64_t infinity) {                                          \
        const unsigned_type *restrict x = memory, magnitude = (unsigned_type)-1 >> 1, inf = (unsigned_type)infinity;  \
        unsigned_type any = 0;                                                                                        \
        for (int i = 0; i < n; i++)                                                                                   \
            any |= (unsigned_type)((x[i] & magnitude) > inf) | (unsigned_type)(x[i] == inf);                          \
        return !any;                                                                                                  \
    }

MASKED(16, uint16_t)
MASKED(32, uint32_t)
MASKED(64, uint64_t)

/* Add the sums of n finite elements to those of all previous ones. */
static void add(double *out, const Block *b, double n) {
    double off = b->sum / n, squares = b->squares - b->sum * off;
    double before = out[COUNT], all = before + n, delta = b->shift + off - out[MEAN];
    if (n == 0)
        return;
    out[COUNT] = all;
    out[MEAN] += delta * (n / all);
    out[SQUARES] += (squares > 0 ? squares : 0) + delta * delta * (before * (n / all));
    out[MIN] = b->min < out[MIN] ? b->min : out[MIN];
    out[MAX] = b->max > out[MAX] ? b->max : out[MAX];
    out[ZEROS] += b->zeros;
    out[SHIFT] = b->shift + off;
}

/* Store the finite elements of a block side by side, and count the others. Return the number of finite ones. */
#define FINITE(name, type, unsigned_type, magnitude_bits, infinity)                                                   \
    static int finite_##name(const type *x, int n, type *to, double *out) {                                           \
        int kept = 0, nans = 0, infs = 0, negative = 0;                                                               \
        for (int i = 0; i < n; i++) {                                                                                 \
            union { type f; unsigned_type u; } v = {x[i]};                                                            \
            unsigned_type magnitude = v.u & magnitude_bits;                                                           \
            to[kept] = v.f;                                                                                           \
            kept += magnitude < infinity;                                                                             \
            nans += magnitude > infinity;                                                                             \
            infs += v.u == infinity;                                                                                  \
            negative += magnitude == infinity;                                                                        \
        }                                                                                                             \
        out[NANS] += nans, out[INFS] += infs, out[NEGATIVE_INFS] += negative - infs;                                  \
        return kept;                                                                                                  \
    }

FINITE(f32, float, uint32_t, 0x7fffffffu, 0x7f800000u)
FINITE(f64, double, uint64_t, 0x7fffffffffffffffu, 0x7ff0000000000000u)

/* Squares of magnitudes outside of this range underflow or overflow in single precision. */
static int is_safe(const Block *b) {
    double peak = -b->min > b->max ? -b->min : b->max;
    return peak == 0 || (peak > 1e-15 && peak < 1e15);
}

/* Whether an element is not finite, or a sum has overflowed. */
static int is_odd(const Block *b) {
    return b->sum - b->sum != 0 || b->squares - b->squares != 0;
}

#define BLOCKS(name, type)                                                                                            \
    /* Sum about the last block's mean, or about the mean of the first elements if there is none. */                  \
    static void about_mean_##name(const Set *set, const type *x, int n, const double *out, Block *b) {                \
        double shift = out[SHIFT];                                                                                    \
        if (out[COUNT] == 0 && n) {                                                                                   \
            int m = n < SAMPLE ? n : SAMPLE;                                                                          \
            set->name(x, m, x[0], b);                                                                                 \
            shift = b->shift + b->sum / m;                                                                            \
            shift = shift - shift == 0 ? shift : 0;                                                                   \
        }                                                                                                             \
        set->name(x, n, shift, b);                                                                                    \
    }

BLOCKS(f32, float)
BLOCKS(f64, double)

static void block_f64(const Set *set, const double *x, int n, double *out) {
    double kept[BLOCK];
    Block b;
    about_mean_f64(set, x, n, out, &b);
    if (is_odd(&b)) {
        n = finite_f64(x, n, kept, out);
        about_mean_f64(set, kept, n, out, &b);
    }
    add(out, &b, n);
}

static void block_f32(const Set *set, const float *x, int n, double *out) {
    float kept[BLOCK];
    double wide[BLOCK];
    Block b;
    about_mean_f32(set, x, n, out, &b);
    if (is_odd(&b)) {
        n = finite_f32(x, n, kept, out);
        x = kept;
        about_mean_f32(set, x, n, out, &b);
    }
    if (!is_safe(&b) || is_odd(&b)) {
        for (int i = 0; i < n; i++)
            wide[i] = x[i];
        about_mean_f64(set, wide, n, out, &b);
    }
    add(out, &b, n);
}

static void block(const Set *set, const void *x, int n, int dtype, double *out) {
    float wide[BLOCK];
    if (dtype == F64)
        block_f64(set, x, n, out);
    else if (dtype == F32)
        block_f32(set, x, n, out);
    else {
        (dtype == F16 ? set->half : set->brain)(x, n, wide);
        block_f32(set, wide, n, out);
    }
}

/* Return the version of this interface; hookd/target/tensors/kernel.py compares it. */
EXPORTED int hookd_version(void) {
    return 2;
}

/* Return the instruction set that this processor has and the system supports: 0 for any, 1 for AVX2 with FMA and F16C,
 * 2 for AVX-512 as in Skylake servers. The processor is queried directly: the compilers' own builtins for this need
 * one of their libraries. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 14.3 and
 * 15.2. */
EXPORTED int hookd_level(void) {
#if defined(__x86_64__)
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, F16C = 1 << 29 };            /* in leaf 1, ecx */
    enum { AVX2 = 1 << 5, F = 1 << 16, DQ = 1 << 17, BW = 1 << 30 };      /* in leaf 7, ebx; the highest bit is VL */
    enum { YMM = 6, ZMM = 0xe6 };                                         /* in XCR0: the registers that the system saves */
    uint32_t eax, ebx, ecx, edx, of_one, saved;
    if (!__get_cpuid(1, &eax, &ebx, &of_one, &edx) || !(of_one & OSXSAVE) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    const uint32_t wide = F | DQ | BW | 1u << 31;
    if ((saved & ZMM) == ZMM && (ebx & wide) == wide)
        return 2;
    if ((saved & YMM) == YMM && (of_one & (FMA | F16C)) == (FMA | F16C) && ebx & AVX2)
        return 1;
#endif
    return 0;
}

static const Set *set_of(int level) {
#if defined(__x86_64__)
    return level == 2 ? &avx512 : level == 1 ? &avx2 : &plain;
#else
    return (void)level, &plain;
#endif
}

static void clear(double *out) {
    for (int i = 0; i < FIELDS; i++)
        out[i] = 0;
    out[MIN] = INF, out[MAX] = -INF;
}

static int size_of(int dtype) {
    return dtype == F64 ? 8 : dtype == F32 ? 4 : 2;
}

/* Summarize n adjacent elements. `out` has FIELDS numbers. */
EXPORTED void hookd_summary(const void *x, int64_t n, int dtype, int level, double *out) {
    const Set *set = set_of(level);
    clear(out);
    for (int64_t i = 0; i < n; i += BLOCK)
        block(set, (const char *)x + i * size_of(dtype), (int)(n - i < BLOCK ? n - i : BLOCK), dtype, out);
}

#define GATHER(bits)                                                                                                  \
    static void gather_##bits(const void *from, int64_t stride, int n, void *to) {                                    \
        for (int i = 0; i < n; i++)                                                                                   \
            ((uint##bits##_t *)to)[i] = ((const uint##bits##_t *)from)[i * stride];                                   \
    }

GATHER(16)
GATHER(32)
GATHER(64)

/* Summarize a tensor with gaps: `sizes` (none is 0) and `strides`, in elements, of its 1 to 64 dimensions. */
EXPORTED void hookd_summary_strided(const void *x, int dims, const int64_t *sizes, const int64_t *strides, int dtype, int level,
                           double *out) {
    void (*gather)(const void *, int64_t, int, void *) =
        dtype == F64 ? gather_64 : dtype == F32 ? gather_32 : gather_16;
    const Set *set = set_of(level);
    int64_t at[64] = {0}, inner = sizes[dims - 1], stride = strides[dims - 1], width = size_of(dtype);
    uint64_t raw[BLOCK];
    int filled = 0, d;
    clear(out);
    for (;;) {
        int64_t row = 0;
        for (d = 0; d < dims - 1; d++)
            row += at[d] * strides[d];
        for (int64_t i = 0; i < inner;) {
            int n = (int)(inner - i < BLOCK - filled ? inner - i : BLOCK - filled);
            gather((const char *)x + (row + i * stride) * width, stride, n, (char *)raw + filled * width);
            i += n, filled += n;
            if (filled == BLOCK)
                block(set, raw, filled, dtype, out), filled = 0;
        }
        for (d = dims - 2; d >= 0 && ++at[d] == sizes[d]; d--)
            at[d] = 0;
        if (d < 0)
            break;
    }
    if (filled)
        block(set, raw, filled, dtype, out);
}

static const uint64_t infinity[] = {0x7f800000u, 0x7ff0000000000000u, 0x7c00u, 0x7f80u}; /* by dtype */

typedef uint64_t (*Most)(const void *, int);

static Most most_of(const Set *set, int dtype) {
    int width = size_of(dtype);
    return width == 8 ? set->most_64 : width == 4 ? set->most_32 : set->most_16;
}

/* Check n adjacent elements. Return 0 if all are finite, 1 if only -inf is among the others, 2 for a NaN or +inf. */
EXPORTED int hookd_is_finite(const void *x, int64_t n, int dtype, int level) {
    int width = size_of(dtype), found = 0;
    Most most = most_of(set_of(level), dtype);
    int (*masked)(const void *, int, uint64_t) = width == 8 ? masked_64 : width == 4 ? masked_32 : masked_16;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const char *at = (const char *)x + i * width;
        int m = (int)(n - i < BLOCK ? n - i : BLOCK);
        if (most(at, m) < infinity[dtype])
            continue;
        if (!masked(at, m, infinity[dtype]))
            return 2;
        found = 1;
    }
    return found;
}

/* Return the largest magnitude in several tensors, each with n adjacent elements; NaN if there is one. */
EXPORTED double hookd_largest(const void *const *x, const int64_t *n, int tensors, int dtype, int level) {
    Most most = most_of(set_of(level), dtype);
    uint64_t largest = 0;
    for (int t = 0; t < tensors; t++)
        for (int64_t i = 0; i < n[t]; i += BLOCK) {
            uint64_t m = most((const char *)x[t] + i * size_of(dtype), (int)(n[t] - i < BLOCK ? n[t] - i : BLOCK));
            largest = m > largest ? m : largest;
        }
    union { uint64_t u; double f; } wide = {largest};
    uint16_t half = (uint16_t)largest;
    float narrow = from_bits((uint32_t)largest << (dtype == BF16 ? 16 : 0));
    if (dtype == F64)
        return wide.f;
    if (dtype == F16)
        half_plain(&half, 1, &narrow);
    return narrow;
}
