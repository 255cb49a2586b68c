/* Attention of one token of each request to coded rows, in one pass over them, from where they lie.

   A row is decoded once, into the core's nearest memory, for all query heads that share it. A scale of a whole row is
   multiplied with the row's logit, or its weight, in place of its numbers. What bytes mean is a table that is given. */

#include <stdint.h>
#include <string.h>

#define ROWS 8   /* decoded at a time */
#define BLOCK 64 /* of one maximum */

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define FOR_ITS_VECTORS __attribute__((target_clones("arch=haswell", "default")))
#else
#define FOR_ITS_VECTORS
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float eight __attribute__((vector_size(32)));
typedef float eight_anywhere __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t eight_int __attribute__((vector_size(32)));
typedef uint16_t eight_halves __attribute__((vector_size(16)));
typedef uint32_t eight_words __attribute__((vector_size(32)));

/* What is told of keys, or of values; addresses are of row 0 of head 0 of unit 0. */
enum { CODES, CODES_UNIT, CODES_ROW, CODES_HEAD, SCALES, SCALES_UNIT, SCALES_ROW, SCALES_HEAD, OFFSETS, OFFSETS_UNIT,
       OFFSETS_ROW, OFFSETS_HEAD, KIND, TABLE, WIDTH, GROUPS, SCALE_BYTES, SCALE_TABLE, DIM,
       SMALLEST };

/* Kinds of codes. */
enum { BYTES, NIBBLES, BF16, FP32 };

INLINE float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A scale, or an offset, of one, two (bf16) or four bytes (fp32); what is nearer to zero than the smallest is zero. */
INLINE float scale_at(const unsigned char *at, int64_t bytes, const float *table, float smallest)
{
    uint32_t word = 0;
    uint16_t half;
    if (bytes == 1)
        return table[*at];
    if (bytes == 2) {
        memcpy(&half, at, 2);
        const float value = of_bits((uint32_t)half << 16);
        return __builtin_fabsf(value) < smallest ? 0 : value;
    }
    memcpy(&word, at, 4);
    return of_bits(word);
}

INLINE void codes_of(const unsigned char *codes, int64_t kind, const float *table, int64_t dim, float *row)
{
    if (kind == NIBBLES)
        for (int64_t d = 0; d < dim; d += 2)
            memcpy(row + d, table + 2 * codes[d / 2], 8);
    else if (kind == BYTES)
        for (int64_t d = 0; d < dim; d++)
            row[d] = table[codes[d]];
    else if (kind == BF16)
        for (int64_t d = 0; d < dim; d += 8) {
            eight_halves some;
            memcpy(&some, codes + 2 * d, 16);
            eight_words wide = __builtin_convertvector(some, eight_words) << 16;
            memcpy(row + d, &wide, 32);
        }
    else
        memcpy(row, codes, 4 * dim);
}

/* A row as numbers; what is still to be multiplied with them. */
INLINE float decoded(const int64_t *side, int64_t unit, int64_t line, int64_t head, int64_t kind, float *row)
{
    const int64_t dim = side[DIM], groups = side[GROUPS], width = side[WIDTH], bytes = side[SCALE_BYTES];
    codes_of((const unsigned char *)side[CODES] + unit * side[CODES_UNIT] + line * side[CODES_ROW] +
                 head * side[CODES_HEAD],
             kind, (const float *)side[TABLE], dim, row);
    if (!groups)
        return 1;
    const float *table = (const float *)side[SCALE_TABLE], smallest = of_bits((uint32_t)side[SMALLEST]);
    const unsigned char *scales = (const unsigned char *)side[SCALES] + unit * side[SCALES_UNIT] +
                                  line * side[SCALES_ROW] + head * side[SCALES_HEAD];
    if (groups == 1 && !side[OFFSETS])
        return scale_at(scales, bytes, table, smallest);
    const unsigned char *offsets = (const unsigned char *)side[OFFSETS] + unit * side[OFFSETS_UNIT] +
                                   line * side[OFFSETS_ROW] + head * side[OFFSETS_HEAD];
    for (int64_t group = 0; group < groups; group++) {
        const float scale = scale_at(scales + group * bytes, bytes, table, smallest);
        const float offset = side[OFFSETS] ? scale_at(offsets + group * bytes, bytes, table, smallest) : 0;
        const int64_t end = (group + 1) * width < dim ? (group + 1) * width : dim;
        for (int64_t d = group * width; d < end; d += 8)
            *(eight_anywhere *)(row + d) = *(eight_anywhere *)(row + d) * scale + offset;
    }
    return 1;
}

INLINE float sum_of(eight v)
{
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

/* Sums of neighbours: first those of one vector, then those of the other. */
INLINE eight pairs(eight one, eight other)
{
    return __builtin_shufflevector(one, other, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(one, other, 1, 3, 5, 7, 9, 11, 13, 15);
}

/* A query times each of ROWS rows. */
INLINE eight products(const float *query, const float *rows, int64_t dim)
{
    eight sums[ROWS] = {{0}};
    for (int64_t d = 0; d < dim; d += 8) {
        const eight mine = *(eight_anywhere *)(query + d);
#pragma GCC unroll 8
        for (int64_t n = 0; n < ROWS; n++)
            sums[n] += mine * *(eight_anywhere *)(rows + n * dim + d);
    }
    return pairs(pairs(pairs(sums[0], sums[1]), pairs(sums[2], sums[3])),
                 pairs(pairs(sums[4], sums[5]), pairs(sums[6], sums[7])));
}

INLINE eight chosen(eight_int where, eight one, eight other)
{
    return (eight)((where & (eight_int)one) | (~where & (eight_int)other));
}

/* exp of numbers up to 0, to an ulp or two; NaN stays. */
INLINE eight exp_of(eight given)
{
    const eight round = (eight){0} + 12582912.0f;
    const eight x = chosen(given < -87.0f, (eight){0} - 87.0f, given);
    const eight shifted = x * 1.44269504f + round, n = shifted - round;
    const eight r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    eight y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    eight_int bits = (eight_int)shifted << 23;
    return chosen(given == given, (eight)((eight_int)y + bits), given);
}

INLINE void attend_head(const float *query, int64_t group, float scale, const int64_t *keys, const int64_t *values,
                        int64_t key_kind, int64_t value_kind, int64_t head, const int64_t *runs, int64_t count,
                        float *out, float *greatest, float *total)
{
    const int64_t dim = keys[DIM], value_dim = values[DIM];
    /* Where there are fewer rows, those of before: finite, or NaN that is in the sums already. */
    float rows[ROWS * (value_dim > dim ? value_dim : dim)], factors[ROWS] = {0}, logits[group * BLOCK];
    memset(rows, 0, sizeof rows);
    for (int64_t n = 0; n < group; n++)
        greatest[n] = -__builtin_inff(), total[n] = 0;
    memset(out, 0, sizeof(float) * group * value_dim);
    for (; count; count--, runs += 3)
        for (int64_t begin = 0; begin < runs[2]; begin += BLOCK) {
            const int64_t unit = runs[0], first = runs[1] + begin;
            const int64_t some = runs[2] - begin < BLOCK ? runs[2] - begin : BLOCK;
            for (int64_t start = 0; start < some; start += ROWS) {
                for (int64_t n = 0; n < ROWS && start + n < some; n++)
                    factors[n] = scale * decoded(keys, unit, first + start + n, head, key_kind, rows + n * dim);
                for (int64_t q = 0; q < group; q++)
                    *(eight_anywhere *)(logits + q * BLOCK + start) =
                        *(eight_anywhere *)factors * products(query + q * dim, rows, dim);
            }
            for (int64_t q = 0; q < group; q++) {
                float *mine = logits + q * BLOCK, most = greatest[q];
                for (int64_t n = 0; n < some; n++)
                    most = mine[n] > most ? mine[n] : most;
                for (int64_t n = some; n & 7; n++)
                    mine[n] = most;
                if (most > greatest[q]) {
                    const eight before = exp_of((eight){0} + (greatest[q] - most));
                    const float less = total[q] ? before[0] : 0;
                    total[q] *= less;
                    for (int64_t d = 0; d < value_dim; d += 8)
                        *(eight_anywhere *)(out + q * value_dim + d) *= less;
                    greatest[q] = most;
                }
                eight sum = {0};
                for (int64_t n = 0; n < some; n += 8) {
                    eight weight = exp_of(*(eight_anywhere *)(mine + n) - most);
                    for (int64_t k = some - n; k < 8; k++)
                        weight[k] = 0;
                    *(eight_anywhere *)(mine + n) = weight;
                    sum += weight;
                }
                total[q] += sum_of(sum);
            }
            for (int64_t start = 0; start < some; start += ROWS) {
                for (int64_t n = 0; n < ROWS && start + n < some; n++)
                    factors[n] = decoded(values, unit, first + start + n, head, value_kind, rows + n * value_dim);
                for (int64_t q = 0; q < group; q++) {
                    const eight weights = *(eight_anywhere *)(logits + q * BLOCK + start) * *(eight_anywhere *)factors;
                    float *mine = out + q * value_dim;
                    for (int64_t d = 0; d < value_dim; d += 8) {
                        eight sum = *(eight_anywhere *)(mine + d);
#pragma GCC unroll 8
                        for (int64_t n = 0; n < ROWS; n++)
                            sum += weights[n] * *(eight_anywhere *)(rows + n * value_dim + d);
                        *(eight_anywhere *)(mine + d) = sum;
                    }
                }
            }
        }
    for (int64_t q = 0; q < group; q++)
        for (int64_t d = 0; d < value_dim && total[q] != 0; d += 8)
            *(eight_anywhere *)(out + q * value_dim + d) /= total[q];
}

/* Heads first .. last - 1 of all requests, request by request. Of each: query [group, dim] -> out [group, value dim],
   the greatest logit and the sum of the others' exponentials beside it. Runs are (unit, row, count), those of request r
   from of_request[r] on. */
FOR_ITS_VECTORS
void kvcore_attend(const float *query, int64_t heads, int64_t group, float scale, const int64_t *keys,
                   const int64_t *values, const int64_t *runs, const int64_t *of_request, int64_t first, int64_t last,
                   float *out, float *greatest, float *total)
{
    const int64_t dim = keys[DIM], value_dim = values[DIM], key_kind = keys[KIND], value_kind = values[KIND];
    for (int64_t each = first; each < last; each++) {
        const int64_t request = each / heads, head = each % heads, begin = of_request[request];
        const float *mine = query + each * group * dim;
        const int64_t *seen = runs + 3 * begin, count = of_request[request + 1] - begin;
        float *found = out + each * group * value_dim, *most = greatest + each * group, *sum = total + each * group;
        if (key_kind == BYTES && value_kind == BYTES)
            attend_head(mine, group, scale, keys, values, BYTES, BYTES, head, seen, count, found, most, sum);
        else if (key_kind == NIBBLES && value_kind == NIBBLES)
            attend_head(mine, group, scale, keys, values, NIBBLES, NIBBLES, head, seen, count, found, most, sum);
        else
            attend_head(mine, group, scale, keys, values, key_kind, value_kind, head, seen, count, found, most, sum);
    }
}
