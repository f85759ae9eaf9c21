// Every frame over `Lanes`. Included by kernels.cpp once per instruction set.

#include "input_lanes.inl"

namespace sign {
#include "sign_blocks.inl"
#include "sign_fused.inl"
}
namespace int8 {
#include "int8_blocks.inl"
}

constexpr Kernels kernels{sign::kernel, int8::kernel, sign::fused};
