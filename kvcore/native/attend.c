/* Attention of one token of each request to coded rows, in one pass over them, from where they lie.

   A row is decoded once, into the core's nearest memory, for all query heads that share it, eight numbers at a time. A
   scale of a whole row is multiplied with the row's logit, or its weight, in place of its numbers. What four bits mean
   is a table that is given. */

#include <stdint.h>
#include <string.h>

#define ROWS 8   /* decoded at a time */
#define BLOCK 64 /* of one maximum */

#define INLINE static inline __attribute__((always_inline))

typedef float eight __attribute__((vector_size(32)));
typedef float eight_anywhere __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t eight_int __attribute__((vector_size(32)));
typedef uint32_t eight_words __attribute__((vector_size(32)));

/* What is told of keys, or of values; addresses are of row 0 of head 0 of unit 0. */
enum { CODES, CODES_UNIT, CODES_ROW, CODES_HEAD, SCALES, SCALES_UNIT, SCALES_ROW, SCALES_HEAD, OFFSETS, OFFSETS_UNIT,
       OFFSETS_ROW, OFFSETS_HEAD, KIND, LEVELS, WIDTH, GROUPS, SCALE_BYTES, SCALE_TABLE, DIM,
       SMALLEST, TOKENS, BY_CHANNEL, CODES_STEP, SCALES_STEP };

/* A row may be that of TOKENS tokens, whose codes and scales are steps from each other: those of a token after another,
   or BY_CHANNEL those of all tokens in a channel after another. */

/* Kinds of codes. */
enum { INT8, E4M3, NIBBLES, BF16, FP32 };

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

INLINE eight chosen(eight_int where, eight one, eight other)
{
    return (eight)((where & (eight_int)one) | (~where & (eight_int)other));
}

/* Of sixteen levels those that eight codes name. */
INLINE eight levels_of(const float *levels, eight_words codes)
{
#if defined(__clang__)
    eight found;
    for (int64_t n = 0; n < 8; n++)
        found[n] = levels[codes[n]];
    return found;
#else
    const eight lower = *(eight_anywhere *)levels, upper = *(eight_anywhere *)(levels + 8);
    return chosen((eight_int)codes > 7, __builtin_shuffle(upper, (eight_int)codes),
                  __builtin_shuffle(lower, (eight_int)codes));
#endif
}

/* Numbers of four bits of exponent, which is 7 too large, and three of mantissa; all ones are no number. */
INLINE eight e4m3_of(eight_words codes)
{
    const eight_words size = codes & 127;
    const eight normal = (eight)((size << 20) + (120u << 23));
    const eight found = chosen((eight_int)size < 8, (normal - 0.0078125f) * 2.0f, normal);
    return (eight)(((eight_words)found | (codes & 128) << 24) | (eight_words)((eight_int)size == 127));
}

/* COUNT numbers from a row's number FIRST on, a multiple of eight as COUNT is, multiplied and moved where SCALED says so.
   Loops over single numbers are those that compilers make vectors of by themselves. */
INLINE void numbers_of(const unsigned char *codes, int64_t kind, const float *levels, int64_t first, int64_t count,
                       int64_t scaled, float scale, float offset, float *found)
{
    if (kind == INT8)
        for (int64_t d = 0; d < count; d++) {
            const float code = (float)(signed char)codes[first + d];
            found[d] = scaled ? code * scale + offset : code;
        }
    else if (kind == E4M3) {
        for (int64_t d = 0; d < count; d++)
            found[d] = of_bits(codes[first + d]);
        for (int64_t d = 0; d < count; d += 8) {
            const eight some = e4m3_of((eight_words) * (eight_anywhere *)(found + d));
            *(eight_anywhere *)(found + d) = scaled ? some * scale + offset : some;
        }
    } else if (kind == NIBBLES)
        for (int64_t d = 0; d < count; d += 8) {
            uint32_t word;
            memcpy(&word, codes + (first + d) / 2, 4);
            const eight_words named = ((eight_words){0} + word) >> (eight_words){0, 4, 8, 12, 16, 20, 24, 28};
            const eight some = levels_of(levels, named & 15);
            *(eight_anywhere *)(found + d) = scaled ? some * scale + offset : some;
        }
    else if (kind == BF16)
        for (int64_t d = 0; d < count; d++) {
            uint16_t half;
            memcpy(&half, codes + 2 * (first + d), 2);
            found[d] = of_bits((uint32_t)half << 16);
        }
    else
        memcpy(found, codes + 4 * first, 4 * count);
}

/* A row as numbers; what is still to be multiplied with them. */
INLINE float decoded(const int64_t *side, int64_t unit, int64_t line, int64_t head, int64_t kind, float *row)
{
    const int64_t dim = side[DIM], groups = side[GROUPS], width = side[WIDTH], bytes = side[SCALE_BYTES];
    const int64_t tokens = side[TOKENS], token = tokens > 1 ? line % tokens : 0;
    line = tokens > 1 ? line / tokens : line;
    const unsigned char *codes = (const unsigned char *)side[CODES] + unit * side[CODES_UNIT] +
                                 line * side[CODES_ROW] + head * side[CODES_HEAD] + token * side[CODES_STEP];
    const float *levels = (const float *)side[LEVELS];
    const float *table = (const float *)side[SCALE_TABLE], smallest = of_bits((uint32_t)side[SMALLEST]);
    const unsigned char *scales = (const unsigned char *)side[SCALES] + unit * side[SCALES_UNIT] +
                                  line * side[SCALES_ROW] + head * side[SCALES_HEAD] + token * side[SCALES_STEP];
    if (groups <= 1 && !side[OFFSETS]) {
        numbers_of(codes, kind, levels, 0, dim, 0, 1, 0, row);
        return groups ? scale_at(scales, bytes, table, smallest) : 1;
    }
    const unsigned char *offsets = (const unsigned char *)side[OFFSETS] + unit * side[OFFSETS_UNIT] +
                                   line * side[OFFSETS_ROW] + head * side[OFFSETS_HEAD] + token * side[SCALES_STEP];
    for (int64_t group = 0; group < groups; group++) {
        const float scale = scale_at(scales + group * bytes, bytes, table, smallest);
        const float offset = side[OFFSETS] ? scale_at(offsets + group * bytes, bytes, table, smallest) : 0;
        const int64_t first = group * width, count = width < dim - first ? width : dim - first;
        numbers_of(codes, kind, levels, first, count, 1, scale, offset, row + first);
    }
    return 1;
}

/* ROWS tokens of a row that is coded by channel: their numbers in one channel after another. */
INLINE void channels(const int64_t *side, int64_t unit, int64_t line, int64_t head, int64_t kind, float *found)
{
    const int64_t tokens = side[TOKENS], token = line % tokens, bytes = side[SCALE_BYTES], step = side[SCALES_STEP];
    line /= tokens;
    const unsigned char *codes = (const unsigned char *)side[CODES] + unit * side[CODES_UNIT] +
                                 line * side[CODES_ROW] + head * side[CODES_HEAD];
    const unsigned char *scales = (const unsigned char *)side[SCALES] + unit * side[SCALES_UNIT] +
                                  line * side[SCALES_ROW] + head * side[SCALES_HEAD];
    const unsigned char *offsets = (const unsigned char *)side[OFFSETS] + unit * side[OFFSETS_UNIT] +
                                   line * side[OFFSETS_ROW] + head * side[OFFSETS_HEAD];
    const float *table = (const float *)side[SCALE_TABLE], smallest = of_bits((uint32_t)side[SMALLEST]);
    for (int64_t d = 0; d < side[DIM]; d++) {
        const float scale = scale_at(scales + d * step, bytes, table, smallest);
        const float offset = side[OFFSETS] ? scale_at(offsets + d * step, bytes, table, smallest) : 0;
        numbers_of(codes + d * side[CODES_STEP], kind, (const float *)side[LEVELS], token, ROWS, 1, scale, offset,
                   found + d * ROWS);
    }
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

/* A query times each of ROWS rows, which lie in one channel after another. */
INLINE eight products_of_channels(const float *query, const float *found, int64_t dim)
{
    eight sums[4] = {{0}};
    for (int64_t d = 0; d < dim; d += 4)
#pragma GCC unroll 4
        for (int64_t n = 0; n < 4; n++)
            sums[n] += query[d + n] * *(eight_anywhere *)(found + (d + n) * ROWS);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
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
                        int64_t key_kind, int64_t value_kind, int64_t keys_by_channel, int64_t values_by_channel,
                        int64_t head, const int64_t *runs, int64_t count, float *out, float *greatest, float *total)
{
    const int64_t dim = keys[DIM], value_dim = values[DIM];
    /* Where there are fewer rows, keys of before: their logits are looked at by nothing. */
    float rows[ROWS * (value_dim > dim ? value_dim : dim)], factors[ROWS] = {0}, logits[group * BLOCK];
    memset(rows, 0, sizeof rows);
    for (int64_t n = 0; n < group; n++)
        greatest[n] = -__builtin_inff(), total[n] = 0;
    memset(out, 0, sizeof(float) * group * value_dim);
    for (; count; count--, runs += 3)
        for (int64_t begin = 0; begin < runs[2]; begin += BLOCK) {
            const int64_t unit = runs[0], first = runs[1] + begin;
            const int64_t some = runs[2] - begin < BLOCK ? runs[2] - begin : BLOCK;
            for (int64_t start = 0; start < some && keys_by_channel; start += ROWS) {
                channels(keys, unit, first + start, head, key_kind, rows);
                for (int64_t q = 0; q < group; q++)
                    *(eight_anywhere *)(logits + q * BLOCK + start) =
                        scale * products_of_channels(query + q * dim, rows, dim);
            }
            for (int64_t start = 0; start < some && !keys_by_channel; start += ROWS) {
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
            for (int64_t start = 0; start < some && values_by_channel; start += ROWS) {
                channels(values, unit, first + start, head, value_kind, rows);
                for (int64_t q = 0; q < group; q++)
                    for (int64_t d = 0; d < value_dim; d += 8)
                        *(eight_anywhere *)(out + q * value_dim + d) +=
                            products(logits + q * BLOCK + start, rows + d * ROWS, ROWS);
            }
            for (int64_t start = 0; start < some && !values_by_channel; start += ROWS) {
                const int64_t left = some - start < ROWS ? some - start : ROWS;
                for (int64_t n = 0; n < left; n++)
                    factors[n] = decoded(values, unit, first + start + n, head, value_kind, rows + n * value_dim);
                /* Their weights are 0; an infinite number of before would still make the sum NaN. */
                for (int64_t n = left; n < ROWS; n++)
                    factors[n] = 0;
                memset(rows + left * value_dim, 0, sizeof(float) * (ROWS - left) * value_dim);
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
        if (keys[BY_CHANNEL] && values[BY_CHANNEL] && key_kind == NIBBLES && value_kind == NIBBLES)
            attend_head(mine, group, scale, keys, values, NIBBLES, NIBBLES, 1, 1, head, seen, count, found, most, sum);
        else if (keys[BY_CHANNEL] && !values[BY_CHANNEL] && key_kind == NIBBLES && value_kind == NIBBLES)
            attend_head(mine, group, scale, keys, values, NIBBLES, NIBBLES, 1, 0, head, seen, count, found, most, sum);
        else if (keys[BY_CHANNEL] || values[BY_CHANNEL])
            attend_head(mine, group, scale, keys, values, key_kind, value_kind, keys[BY_CHANNEL], values[BY_CHANNEL],
                        head, seen, count, found, most, sum);
        else if (key_kind == INT8 && value_kind == INT8)
            attend_head(mine, group, scale, keys, values, INT8, INT8, 0, 0, head, seen, count, found, most, sum);
        else if (key_kind == E4M3 && value_kind == E4M3)
            attend_head(mine, group, scale, keys, values, E4M3, E4M3, 0, 0, head, seen, count, found, most, sum);
        else if (key_kind == NIBBLES && value_kind == NIBBLES)
            attend_head(mine, group, scale, keys, values, NIBBLES, NIBBLES, 0, 0, head, seen, count, found, most, sum);
        else
            attend_head(mine, group, scale, keys, values, key_kind, value_kind, 0, 0, head, seen, count, found, most,
                        sum);
    }
}
