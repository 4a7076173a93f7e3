// The vocabulary of kernels for Hopper: what others have, and TMA with rings of tiles, wgmma, the tile scheduler of
// persistent kernels and their epilogue.
#pragma once

#include <fw/attention.cuh>
#include <fw/earlier_names.cuh>
#include <fw/epilogue.cuh>
#include <fw/helpers.cuh>
#include <fw/maxima.cuh>
#include <fw/ring.cuh>
#include <fw/tile_queue.cuh>
#include <fw/tile_scheduler.cuh>
#include <fw/wgmma.cuh>
