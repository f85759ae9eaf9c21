// Adam on flat chunks of host memory: the same bits as onebit/host/reference.py, which specifies them.
//
// adam_blocks.inl holds the algorithm over blocks of 256 elements. It is compiled once per instruction set, each time over
// another lanes_*.inl and words_*.inl, and the best one this CPU has is chosen per call. Loaded by onebit/host/native.py
// with ctypes: raw pointers and sizes in elements, checked there.
//
// Built with -ffp-contract=off: every product and every sum rounds once.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine.inl"
#include "floats.inl"

namespace {

constexpr int64_t kBlock = 256, kLanes = 16;
constexpr uint32_t kLeastExponent = 33, kLargestExponent = 255;  // of a scale
constexpr uint32_t kGolden = 0x9E3779B1u;

enum class Kind : int { kNone = 0, kFloat32 = 1, kBfloat16 = 2, kFloat16 = 3, kEightBits = 4 };

// Memory of a kind.
struct Tensor {
  void* data;
  Kind kind;

  int64_t bytes(int64_t elements) const {
    return kind == Kind::kNone ? 0 : kind == Kind::kFloat32 ? 4 * elements : kind == Kind::kEightBits ? elements : 2 * elements;
  }
  Tensor at(int64_t element) const { return {static_cast<char*>(data) + bytes(element), kind}; }
};

// As AdamConstants in onebit/host/operands.py.
struct Constants {
  float grad_scale, keep, l2, lerp, beta2, one_minus_beta2, eps, move;
  bool from_grad;
  uint32_t seed;
};

// 256 elements of a job. first: the index of the first, modulo 2^32.
struct Block {
  float* p;
  Tensor g, m, v;
  float* scale;  // of v in eight bits
  Tensor out;
  uint32_t first;
};

struct AdamJob {
  float* p;
  Tensor g, m, v;
  float* scales;
  Tensor out;
  int64_t n;
  uint32_t offset;  // of the first element, modulo 2^32
  Constants constants;

  Block block(int64_t b) const {
    const int64_t at = b * kBlock;
    float* scale = scales ? scales + b : nullptr;
    return {p + at, g.at(at), m.at(at), v.at(at), scale, out.at(at), offset + static_cast<uint32_t>(at)};
  }
};

// The last block, of fewer elements, padded with zeros.
struct Padded {
  alignas(64) float p[kBlock] = {}, g[kBlock] = {}, m[kBlock] = {}, v[kBlock] = {}, out[kBlock];
  Block block;

  Padded(const Block& from, int64_t count)
      : block{p, {g, from.g.kind}, {m, from.m.kind}, {v, from.v.kind}, from.scale, {out, from.out.kind}, from.first} {
    std::memcpy(p, from.p, count * sizeof(float));
    std::memcpy(g, from.g.data, from.g.bytes(count));
    std::memcpy(m, from.m.data, from.m.bytes(count));
    std::memcpy(v, from.v.data, from.v.bytes(count));
  }
  void copy_back(const Block& to, int64_t count) const {
    std::memcpy(to.p, p, count * sizeof(float));
    std::memcpy(to.m.data, m, to.m.bytes(count));
    std::memcpy(to.v.data, v, to.v.bytes(count));
    if (to.out.kind != Kind::kNone) std::memcpy(to.out.data, out, to.out.bytes(count));
  }
};

// Does blocks [begin, end) of the job's.
using Adam = void (*)(const AdamJob&, int64_t begin, int64_t end);

// `yes` where `is`, else `no`: by masks, for a branch around float arithmetic keeps a loop from becoming vectors.
inline uint32_t choose(bool is, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(is);
  return (yes & mask) | (no & ~mask);
}

// To nearest even; a NaN becomes 0x7E00.
inline uint16_t float16_near(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFFu;
  // Halves below 2^-14 are steps of 2^-24, as floats from a half to one are: adding a half rounds.
  const uint32_t small = bits_of_float(float_from_bits(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t finite = choose(magnitude < 0x38800000u, small, normal);
  const uint32_t near = choose(magnitude >= 0x47800000u, 0x7C00u, finite);
  return static_cast<uint16_t>(choose(magnitude > 0x7F800000u, 0x7E00u, near) | ((bits >> 16) & 0x8000u));
}

}  // namespace

#define ONEBIT_TARGET
namespace portable {
namespace {
#include "lanes_portable.inl"
#include "words_portable.inl"
#include "adam_blocks.inl"
}  // namespace
}  // namespace portable
#undef ONEBIT_TARGET

#ifdef ONEBIT_X86
#define ONEBIT_TARGET __attribute__((target("avx2")))
namespace avx2 {
namespace {
#include "lanes_avx2.inl"
#include "words_avx2.inl"
#include "adam_blocks.inl"
}  // namespace
}  // namespace avx2
#undef ONEBIT_TARGET

#define ONEBIT_TARGET __attribute__((target("avx512f,avx512dq")))
namespace avx512 {
namespace {
#include "lanes_avx512.inl"
#include "words_avx512.inl"
#include "adam_blocks.inl"
}  // namespace
}  // namespace avx512
#undef ONEBIT_TARGET
#endif

namespace {

// nullptr where this CPU lacks `isa`.
Adam adam_for(int isa) {
  static const int best = best_isa();
  if (isa == kAuto) isa = best;
  if (isa > best) return nullptr;
  switch (isa) {
    case kPortable: return portable::adam;
#ifdef ONEBIT_X86
    case kAvx2: return avx2::adam;
    case kAvx512: return avx512::adam;
#endif
    default: return nullptr;
  }
}

}  // namespace

// Raise it together with native.py's when a signature or a code changes: a library of older sources is then refused.
ONEBIT_API int onebit_host_abi_version() { return 1; }

ONEBIT_API int onebit_host_best_isa() { return best_isa(); }

ONEBIT_API int onebit_host_has_openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// constants: grad_scale, keep, l2, lerp, beta2, 1-beta2, eps, move. Kinds: 0 none, 1 float32, 2 bfloat16,
// 3 float16, 4 eight bits. Returns 0, or 1 where this CPU lacks `isa` (then nothing is written).
ONEBIT_API int onebit_host_adam(float* p, void* g, int g_kind, void* m, int m_kind, void* v, int v_kind, float* scales,
                                void* out, int out_kind, int64_t n, int64_t offset, const double* constants,
                                int from_grad, uint32_t seed, int isa, int threads) {
  const Adam adam = adam_for(isa);
  if (!adam) return 1;
  float c[8];
  for (int i = 0; i < 8; ++i) c[i] = static_cast<float>(constants[i]);
  const AdamJob job{p,
                    {g, static_cast<Kind>(g_kind)},
                    {m, static_cast<Kind>(m_kind)},
                    {v, static_cast<Kind>(v_kind)},
                    scales,
                    {out, static_cast<Kind>(out_kind)},
                    n,
                    static_cast<uint32_t>(offset),
                    {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], from_grad != 0, seed}};
  run(adam, job, (n + kBlock - 1) / kBlock, threads);
  return 0;
}
