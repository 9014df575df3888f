// Online softmax of one row, in the domain of base-2 logarithms.
#pragma once
#include "gfx9.h"

constexpr f32 LOG2_E = 1.44269504088896340736f;
constexpr f32 LN_2 = 0.69314718055994530942f;
// Stands for "no logit yet". Finite, because -inf - -inf is NaN; a logit below it counts as hidden.
constexpr f32 NO_LOGIT = -3.0e38f;
constexpr f32 INFINITE = __builtin_inff();

// `base` is what sum and output are relative to: the maximum so far, rounded up to a whole number, so that every rescale is by a power of two and rounds
// nothing; or up to `slack` less than that, so that a rescale is seldom needed.
struct OnlineSoftmax {
    f32 base = NO_LOGIT;
    f32 sum = 0.0f;  // of this lane's own weights only; added over lanes and waves once, at the end

    DEVICE_MEMBER static f32 base_for(f32 logit_max) { return max(NO_LOGIT, __builtin_ceilf(logit_max)); }
    // Takes in another base; returns the factor for all that was accumulated before.
    DEVICE_MEMBER f32 rescale_for(f32 other, f32 slack) {
        const f32 new_base = other > base + slack ? other : base;
        const f32 factor = exp2(base - new_base);
        base = new_base;
        sum *= factor;
        return factor;
    }
};

// Natural log of a sum of exponentials given as 2^base * sum; a sum of nothing is -inf, the identity of the merge.
DEVICE f32 lse_of(f32 base, f32 sum) { return sum == 0.0f ? -INFINITE : (base + log2(sum)) * LN_2; }
DEVICE f32 reciprocal_or_zero(f32 sum) { return sum == 0.0f ? 0.0f : reciprocal(sum); }
