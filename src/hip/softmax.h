// Online softmax of one row, in the domain of base-2 logarithms.
#pragma once
#include "gfx9.h"

constexpr f32 LOG2_E = 1.44269504088896340736f;
constexpr f32 LN_2 = 0.69314718055994530942f;
// Stands for "no logit yet". Finite, because -inf - -inf is NaN; below every finite logit.
constexpr f32 NO_LOGIT = -3.0e38f;
constexpr f32 INFINITE = __builtin_inff();

// `max` is kept as a whole number, the maximum rounded up: then every rescale is by a power of two and rounds nothing.
struct OnlineSoftmax {
    f32 max = NO_LOGIT;
    f32 sum = 0.0f;  // of this lane's own weights only; added over lanes and waves once, at the end

    // Takes in the maximum of new logits; returns the factor for all that was accumulated before.
    DEVICE_MEMBER f32 rescale_for(f32 logit_max) {
        const f32 new_max = ::max(max, __builtin_ceilf(logit_max));
        const f32 factor = exp2(max - new_max);
        max = new_max;
        sum *= factor;
        return factor;
    }
    DEVICE_MEMBER f32 weight(f32 logit) const { return exp2(logit - max); }
};

// Natural log of a sum of exponentials given as 2^max * sum; a sum of nothing is -inf, the identity of the merge.
DEVICE f32 lse_of(f32 max, f32 sum) { return sum == 0.0f ? -INFINITE : (max + log2(sum)) * LN_2; }
DEVICE f32 reciprocal_or_zero(f32 sum) { return sum == 0.0f ? 0.0f : reciprocal(sum); }
