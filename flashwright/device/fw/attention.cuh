// The vocabulary of the generated kernels: one name for each idiom, each in the file of its noun.
#pragma once

#include <fw/convert.cuh>
#include <fw/copy.cuh>
#include <fw/fragment.cuh>
#include <fw/global.cuh>
#include <fw/math.cuh>
#include <fw/mma.cuh>
#include <fw/shared.cuh>
#include <fw/turns.cuh>
