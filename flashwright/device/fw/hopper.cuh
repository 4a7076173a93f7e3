// The vocabulary of kernels for Hopper: what others have, and rings of tiles, wgmma, and blocks that stay.
#pragma once

#include <fw/attention.cuh>
#include <fw/helpers.cuh>
#include <fw/maxima.cuh>
#include <fw/out.cuh>
#include <fw/ring.cuh>
#include <fw/walk.cuh>
#include <fw/wgmma.cuh>
