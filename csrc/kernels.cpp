// The frames in C++: the same bytes and the same floats as comm/kernels/reference.py, which specifies both.
//
// sign_blocks.inl, step_blocks.inl and log4_blocks.inl hold the algorithms, over the specification's 16 lanes. They are compiled
// once per instruction set, each time over another lanes_*.inl, and the best one this CPU has is chosen per call. Loaded
// by comm/kernels/cpu.py with ctypes: raw pointers, sizes and strides in elements, checked there.
//
// Built with -ffp-contract=off: every product and every sum rounds once.
//
// Shape legend: K rows, J blocks of a row, B bytes of a frame.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "machine.inl"
#include "floats.inl"

namespace {

constexpr int64_t kLanes = 16;
constexpr uint32_t kInfinityBits = 0x7F800000;

enum class FloatKind : int { kNone = 0, kFloat32 = 1, kBfloat16 = 2 };

struct EncodeJob {
  float* x;
  int64_t x_stride;
  const void* error;
  int64_t error_stride;
  FloatKind error_kind;
  uint8_t* frames;
  int64_t frame_stride;
  const int32_t* counts;
  int64_t counts_stride;
  int64_t J;
  int64_t block;
  bool mean_abs;  // of the sign frame; the others have one kind of scale
};

struct DecodeJob {
  const uint8_t* frames;
  int64_t frame_stride;
  float* out;
  int64_t out_stride;
  int64_t J;
  int64_t block;
  float weight;
  float keep;
  bool reads_out;
};

struct DecodeMeanJob {
  const uint8_t* frames;
  int64_t frame_stride;
  int64_t K;
  float* out;
  int64_t J;
  int64_t block;
};

// Where a fused encoder writes, and what it adds: rows of J blocks. Error and residual are contiguous.
struct FusedEncode {
  const void* error;
  FloatKind error_kind;
  uint8_t* frames;
  int64_t frame_stride;
  const int32_t* counts;
  int64_t counts_stride;
  void* residual;
  FloatKind residual_kind;
  int64_t J;
  int64_t block;
  bool mean_abs;
  bool returns = false;  // a share of the value sent stays in the residual
  float returned = 0.0f;
};

struct EncodeMeanJob {
  FusedEncode to;  // one row
  const uint8_t* received;
  int64_t received_stride;
  int64_t K;
};

// Tensors in place: segment s begins with block first[s] of the rows.
struct PointersJob {
  void* const* data;
  const int32_t* kinds;
  const int64_t* first;
  const int64_t* numels;
  int64_t size;
};

struct MomentumJob {
  FusedEncode to;
  PointersJob grads;
  const float* D;      // or the variance, if there is a
  const float* floor;  // floor for each block
  float correction, eps;
  const uint8_t* m_frames;  // either these
  int64_t m_stride;
  const float* m;  // or this
  float keep, add, own, unscale;
  float* sums;  // those of SumsJob; may be null
};

// The residual of accumulated gradients is both error and residual; if it must not change, no residual is passed.
struct GradientJob {
  FusedEncode to;
  PointersJob grads;
  float add, unscale;
};

struct ApplyJob {
  const uint8_t* frames;
  int64_t frame_stride;
  int64_t J;
  int64_t block;
  PointersJob params;
  const float* weight;
  const float* keep;
};

// A step without frames: rule 8. m, u and anchor are rows without gaps, as D.
struct LocalJob {
  PointersJob grads;
  PointersJob params;
  const float* D;      // or the variance, if there is a
  const float* floor;  // floor for each block
  float correction, eps;
  float* m;
  float keep, add, own, unscale;
  float* u;
  float* anchor;  // may be null
  float weight, kept;
  int64_t block;
};

// The residual of a momentum whose gradients should have had the factor `again` instead of unscale: rule 11.
struct CorrectionJob {
  PointersJob grads;
  const float* D;      // or the variance, if there is a
  const float* floor;  // floor for each block
  float correction, eps;
  float add, own, unscale, again;
  void* residual;
  FloatKind residual_kind;
  int64_t block;
};

// Masters of a chunk and the frame of what their replicas lack: rule 13. Replicas are tensors in its blocks.
struct MastersJob {
  const float* update;
  float* masters;
  PointersJob replicas;
  const int32_t* counts;
  uint8_t* frame;
  float weight, keep;
  int64_t J;
  int64_t block;
  bool mean_abs;  // of the sign frame
};

// Sums of g² and g·(m·D) of each block: rule 12.
struct SumsJob {
  PointersJob grads;
  const float* D;      // or the variance, if there is a
  const float* floor;  // floor for each block
  float correction, eps;
  const uint8_t* m_frames;  // either these
  int64_t m_stride;
  const float* m;  // or this
  float* sums;
  int64_t J;
  int64_t block;
};

// A step of the rank that owns a chunk: rule 9.
struct OwnerJob {
  const uint8_t* received;
  int64_t received_stride;
  int64_t K;
  int64_t row;  // the owner's own
  const float* grad;
  const int32_t* counts;
  float* variance;
  float* direction;
  float* D;  // may be null
  float* sums;
  const float* corrections;  // of each block; else
  float correction1, correction2;
  float weight, own, common, eps, floor, inverse_limit;
  int64_t J;
  int64_t block;
};

// The segment of a block: a walk over blocks in ascending order, with one search.
struct SegmentAt {
  int64_t s, b;
  const PointersJob& tensors;
  const int64_t block;

  SegmentAt(const PointersJob& tensors, int64_t b, int64_t block)
      : s(std::upper_bound(tensors.first, tensors.first + tensors.size, b) - tensors.first - 1), b(b), tensors(tensors),
        block(block) {}
  void next() {
    ++b;
    while (s + 1 < tensors.size && tensors.first[s + 1] <= b) ++s;
  }
  bool is_inside() const { return s >= 0 && (b - tensors.first[s]) * block < tensors.numels[s]; }
};

// Row k, block j of the row: a walk over K·J blocks, row after row, with one division.
struct BlockAt {
  int64_t k, j;
  const int64_t J;

  BlockAt(int64_t index, int64_t J) : k(index / J), j(index % J), J(J) {}
  void next() {
    if (++j == J) j = 0, ++k;
  }
};

// Each function does blocks [begin, end) of the K·J blocks, counted row after row.
struct Kernel {
  void (*encode)(const EncodeJob&, int64_t begin, int64_t end);
  void (*decode)(const DecodeJob&, int64_t begin, int64_t end);
  void (*decode_mean)(const DecodeMeanJob&, int64_t begin, int64_t end);
};

// The same, for frames that come down from the owners of chunks.
struct Down {
  void (*apply)(const ApplyJob&, int64_t begin, int64_t end);
  void (*step_masters)(const MastersJob&, int64_t begin, int64_t end);
};

// The same, for what surrounds sign frames.
struct Fused {
  void (*encode_mean)(const EncodeMeanJob&, int64_t begin, int64_t end);
  void (*encode_momentum)(const MomentumJob&, int64_t begin, int64_t end);
  void (*encode_gradients)(const GradientJob&, int64_t begin, int64_t end);
  void (*local_step)(const LocalJob&, int64_t begin, int64_t end);
  void (*owner_step)(const OwnerJob&, int64_t begin, int64_t end);
  void (*correct_residual)(const CorrectionJob&, int64_t begin, int64_t end);
  void (*momentum_sums)(const SumsJob&, int64_t begin, int64_t end);
};

// Of one instruction set.
struct Kernels {
  Kernel sign, int8, int4, log4;
  Down sign_down, int4_down;
  Fused fused;
};

}  // namespace

#define ONEBIT_TARGET
namespace portable {
namespace {
#include "lanes_portable.inl"
#include "frames.inl"
}  // namespace
}  // namespace portable
#undef ONEBIT_TARGET

#ifdef ONEBIT_X86
#define ONEBIT_TARGET __attribute__((target("avx2")))
namespace avx2 {
namespace {
#include "lanes_avx2.inl"
#include "frames.inl"
}  // namespace
}  // namespace avx2
#undef ONEBIT_TARGET

#define ONEBIT_TARGET __attribute__((target("avx512f,avx512dq")))
namespace avx512 {
namespace {
#include "lanes_avx512.inl"
#include "frames.inl"
}  // namespace
}  // namespace avx512
#undef ONEBIT_TARGET
#endif

namespace {

// nullptr where this CPU lacks `isa`.
const Kernels* kernels_for(int isa) {
  static const int best = best_isa();
  if (isa == kAuto) isa = best;
  if (isa > best) return nullptr;
  switch (isa) {
    case kPortable: return &portable::kernels;
#ifdef ONEBIT_X86
    case kAvx2: return &avx2::kernels;
    case kAvx512: return &avx512::kernels;
#endif
    default: return nullptr;
  }
}

// Zeroes the bytes after the last scale of each row.
void clear_tails(uint8_t* frames, int64_t frame_stride, int64_t K, int64_t frame_bytes, int64_t used_bytes) {
  if (frame_bytes == used_bytes) return;  // frames of no blocks have no memory
  for (int64_t k = 0; k < K; ++k) std::memset(frames + k * frame_stride + used_bytes, 0, frame_bytes - used_bytes);
}

// code_bytes: of a row's signs or bytes, before its scales.
void encode_rows(const Kernel& kernel, const EncodeJob& job, int64_t K, int64_t frame_bytes, int64_t code_bytes,
                 int threads) {
  clear_tails(job.frames, job.frame_stride, K, frame_bytes, code_bytes + 2 * job.J);
  run(kernel.encode, job, K * job.J, threads);
}

}  // namespace

// Raise it together with cpu.py's when a signature or a frame changes: a library built from older sources is then refused.
ONEBIT_API int onebit_abi_version() { return 11; }

ONEBIT_API int onebit_best_isa() { return best_isa(); }

ONEBIT_API int onebit_has_openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// All that follow return 0, or 1 where this CPU lacks `isa` (then nothing is written).

ONEBIT_API int onebit_sign_encode(float* x, int64_t x_stride, const void* error, int64_t error_stride, int error_kind,
                                  uint8_t* frames, int64_t frame_stride, int64_t frame_bytes, const int32_t* counts,
                                  int64_t counts_stride, int64_t K, int64_t J, int64_t block, int mean_abs, int isa,
                                  int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const EncodeJob job{x,      x_stride,      error, error_stride, static_cast<FloatKind>(error_kind), frames, frame_stride,
                      counts, counts_stride, J,     block,        mean_abs != 0};
  encode_rows(kernels->sign, job, K, frame_bytes, J * block / 8, threads);
  return 0;
}

// decode and decode_mean of a frame.
#define ONEBIT_DECODES(frame)                                                                                           \
  ONEBIT_API int onebit_##frame##_decode(const uint8_t* frames, int64_t frame_stride, float* out, int64_t out_stride,   \
                                         int64_t K, int64_t J, int64_t block, double weight, double keep, int isa,      \
                                         int threads) {                                                                 \
    const Kernels* kernels = kernels_for(isa);                                                                          \
    if (!kernels) return 1;                                                                                             \
    const DecodeJob job{frames, frame_stride, out, out_stride, J, block, static_cast<float>(weight),                    \
                        static_cast<float>(keep), keep != 0.0};                                                         \
    run(kernels->frame.decode, job, K * J, threads);                                                                    \
    return 0;                                                                                                           \
  }                                                                                                                     \
  ONEBIT_API int onebit_##frame##_decode_mean(const uint8_t* frames, int64_t frame_stride, int64_t K, float* out,       \
                                              int64_t J, int64_t block, int isa, int threads) {                         \
    const Kernels* kernels = kernels_for(isa);                                                                          \
    if (!kernels) return 1;                                                                                             \
    const DecodeMeanJob job{frames, frame_stride, K, out, J, block};                                                    \
    run(kernels->frame.decode_mean, job, J, threads);                                                                   \
    return 0;                                                                                                           \
  }

// All functions of a frame with this number of bits for each element, and one kind of scale.
#define ONEBIT_FRAME(frame, bits)                                                                                       \
  ONEBIT_API int onebit_##frame##_encode(float* x, int64_t x_stride, const void* error, int64_t error_stride,           \
                                         int error_kind, uint8_t* frames, int64_t frame_stride, int64_t frame_bytes,    \
                                         const int32_t* counts, int64_t counts_stride, int64_t K, int64_t J,            \
                                         int64_t block, int isa, int threads) {                                         \
    const Kernels* kernels = kernels_for(isa);                                                                          \
    if (!kernels) return 1;                                                                                             \
    const EncodeJob job{x, x_stride, error, error_stride, static_cast<FloatKind>(error_kind), frames, frame_stride,     \
                        counts, counts_stride, J, block, false};                                                        \
    encode_rows(kernels->frame, job, K, frame_bytes, J * block * bits / 8, threads);                                    \
    return 0;                                                                                                           \
  }                                                                                                                     \
  ONEBIT_DECODES(frame)

ONEBIT_DECODES(sign)
ONEBIT_FRAME(int8, 8)
ONEBIT_FRAME(int4, 4)
ONEBIT_FRAME(log4, 4)

// error, residual: rows without gaps; kinds: 0 none, 1 float32, 2 bfloat16.

ONEBIT_API int onebit_sign_encode_mean(const uint8_t* received, int64_t received_stride, int64_t K, const void* error,
                                       int error_kind, uint8_t* frame, int64_t frame_bytes, const int32_t* counts,
                                       void* residual, int residual_kind, int64_t J, int64_t block, int mean_abs, int isa,
                                       int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const EncodeMeanJob job{{error, static_cast<FloatKind>(error_kind), frame, frame_bytes, counts, 0, residual,
                           static_cast<FloatKind>(residual_kind), J, block, mean_abs != 0},
                          received, received_stride, K};
  clear_tails(frame, 0, 1, frame_bytes, J * (block / 8) + 2 * J);
  run(kernels->fused.encode_mean, job, J, threads);
  return 0;
}

ONEBIT_API int onebit_sign_encode_momentum(void* const* grads, const int32_t* grad_kinds, const int64_t* first,
                                           const int64_t* numels, int64_t segments, const float* D, const float* floor,
                                           double correction, double eps, const uint8_t* m_frames, int64_t m_stride,
                                           const float* m, double keep, double add, double own, double unscale,
                                           const void* error, int error_kind, uint8_t* frames, int64_t frame_stride,
                                           int64_t frame_bytes, const int32_t* counts, int64_t counts_stride,
                                           void* residual, int residual_kind, float* sums, int64_t K, int64_t J,
                                           int64_t block, int mean_abs, int isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const MomentumJob job{{error, static_cast<FloatKind>(error_kind), frames, frame_stride, counts, counts_stride, residual,
                         static_cast<FloatKind>(residual_kind), J, block, mean_abs != 0},
                        {grads, grad_kinds, first, numels, segments},
                        D, floor, static_cast<float>(correction), static_cast<float>(eps), m_frames, m_stride, m,
                        static_cast<float>(keep), static_cast<float>(add), static_cast<float>(own),
                        static_cast<float>(unscale), sums};
  clear_tails(frames, frame_stride, K, frame_bytes, J * (block / 8) + 2 * J);
  run(kernels->fused.encode_momentum, job, K * J, threads);
  return 0;
}

ONEBIT_API int onebit_sign_encode_gradients(void* const* grads, const int32_t* grad_kinds, const int64_t* first,
                                            const int64_t* numels, int64_t segments, double add, double unscale,
                                            void* owed, int owed_kind, int returns, double returned, uint8_t* frames,
                                            int64_t frame_stride, int64_t frame_bytes, const int32_t* counts,
                                            int64_t counts_stride, int64_t K, int64_t J, int64_t block, int mean_abs,
                                            int isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const FloatKind kind = static_cast<FloatKind>(owed_kind);
  const GradientJob job{{owed, kind, frames, frame_stride, counts, counts_stride, returns ? owed : nullptr, kind, J, block,
                         mean_abs != 0, returns != 0, static_cast<float>(returned)},
                        {grads, grad_kinds, first, numels, segments},
                        static_cast<float>(add), static_cast<float>(unscale)};
  clear_tails(frames, frame_stride, K, frame_bytes, J * (block / 8) + 2 * J);
  run(kernels->fused.encode_gradients, job, K * J, threads);
  return 0;
}

// apply and step_masters of a frame with this number of bits for each element.
#define ONEBIT_DOWN(frame_name, bits)                                                                                   \
  ONEBIT_API int onebit_##frame_name##_apply(const uint8_t* frames, int64_t frame_stride, int64_t K, int64_t J,         \
                                             int64_t block, void* const* params, const int32_t* param_kinds,            \
                                             const int64_t* first, const int64_t* numels, int64_t segments,             \
                                             const float* weight, const float* keep, int isa, int threads) {            \
    const Kernels* kernels = kernels_for(isa);                                                                          \
    if (!kernels) return 1;                                                                                             \
    const ApplyJob job{frames, frame_stride, J, block, {params, param_kinds, first, numels, segments}, weight, keep};   \
    run(kernels->frame_name##_down.apply, job, K * J, threads);                                                         \
    return 0;                                                                                                           \
  }                                                                                                                     \
  ONEBIT_API int onebit_##frame_name##_step_masters(                                                                    \
      const float* update, float* masters, void* const* replicas, const int32_t* replica_kinds, const int64_t* first,   \
      const int64_t* numels, int64_t segments, const int32_t* counts, uint8_t* frame, int64_t frame_bytes,              \
      double weight, double keep, int64_t J, int64_t block, int mean_abs, int isa, int threads) {                       \
    const Kernels* kernels = kernels_for(isa);                                                                          \
    if (!kernels) return 1;                                                                                             \
    const MastersJob job{update, masters, {replicas, replica_kinds, first, numels, segments}, counts, frame,            \
                         static_cast<float>(weight), static_cast<float>(keep), J, block, mean_abs != 0};                \
    clear_tails(frame, 0, 1, frame_bytes, J * block * bits / 8 + 2 * J);                                                \
    run(kernels->frame_name##_down.step_masters, job, J, threads);                                                      \
    return 0;                                                                                                           \
  }

ONEBIT_DOWN(sign, 1)
ONEBIT_DOWN(int4, 4)

ONEBIT_API int onebit_local_step(void* const* grads, const int32_t* grad_kinds, const int64_t* first,
                                 const int64_t* numels, int64_t segments, void* const* params,
                                 const int32_t* param_kinds, const float* D, const float* floor, double correction,
                                 double eps, float* m, double keep, double add, double own, double unscale, float* u,
                                 float* anchor, double weight, double kept, int64_t K, int64_t J, int64_t block, int isa,
                                 int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const LocalJob job{{grads, grad_kinds, first, numels, segments},
                     {params, param_kinds, first, numels, segments},
                     D, floor, static_cast<float>(correction), static_cast<float>(eps), m, static_cast<float>(keep),
                     static_cast<float>(add), static_cast<float>(own), static_cast<float>(unscale), u, anchor,
                     static_cast<float>(weight), static_cast<float>(kept), block};
  run(kernels->fused.local_step, job, K * J, threads);
  return 0;
}

ONEBIT_API int onebit_correct_residual(void* const* grads, const int32_t* grad_kinds, const int64_t* first,
                                       const int64_t* numels, int64_t segments, const float* D, const float* floor,
                                       double correction, double eps, double add, double own, double unscale,
                                       double again, void* residual, int residual_kind, int64_t blocks, int64_t block,
                                       int isa, int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const CorrectionJob job{{grads, grad_kinds, first, numels, segments}, D, floor, static_cast<float>(correction),
                          static_cast<float>(eps), static_cast<float>(add), static_cast<float>(own),
                          static_cast<float>(unscale), static_cast<float>(again), residual,
                          static_cast<FloatKind>(residual_kind), block};
  run(kernels->fused.correct_residual, job, blocks, threads);
  return 0;
}

ONEBIT_API int onebit_sign_momentum_sums(void* const* grads, const int32_t* grad_kinds, const int64_t* first,
                                         const int64_t* numels, int64_t segments, const float* D, const float* floor,
                                         double correction, double eps, const uint8_t* m_frames, int64_t m_stride,
                                         const float* m, float* sums, int64_t K, int64_t J, int64_t block, int isa,
                                         int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const SumsJob job{{grads, grad_kinds, first, numels, segments}, D, floor, static_cast<float>(correction),
                    static_cast<float>(eps), m_frames, m_stride, m, sums, J, block};
  run(kernels->fused.momentum_sums, job, K * J, threads);
  return 0;
}

ONEBIT_API int onebit_sign_owner_step(const uint8_t* received, int64_t received_stride, int64_t K, int64_t row,
                                      const float* grad, const int32_t* counts, float* variance, float* direction,
                                      float* D, float* sums, const float* corrections, double correction1,
                                      double correction2, double weight, double own, double common, double eps,
                                      double floor, double inverse_limit, int64_t J, int64_t block, int isa,
                                      int threads) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) return 1;
  const OwnerJob job{received, received_stride, K, row, grad, counts, variance, direction, D, sums, corrections,
                     static_cast<float>(correction1), static_cast<float>(correction2), static_cast<float>(weight),
                     static_cast<float>(own), static_cast<float>(common), static_cast<float>(eps),
                     static_cast<float>(floor), static_cast<float>(inverse_limit), J, block};
  run(kernels->fused.owner_step, job, J, threads);
  return 0;
}
