/*
 * inspect.cpp - dhp_safe_fa._inspect: what this build ships and what it would launch. Host only; no tensor passes here.
 */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>

#include "../dhp_fa.h"

namespace py = pybind11;
using namespace pybind11::literals;
using Shape = std::array<int64_t, 4>;

// GCC's version is numbers alone; Clang's has its name.
#if defined(__GNUC__) && !defined(__clang__)
#define DHP_COMPILER "GCC " __VERSION__
#else
#define DHP_COMPILER __VERSION__
#endif

static const char *dtype_name(dhp_dtype dtype) {
  return dtype == DHP_FLOAT32 ? "float32" : dtype == DHP_FLOAT16 ? "float16" : "bfloat16";
}

static dhp_dtype dtype_from(const std::string &name) {
  for (dhp_dtype dtype : {DHP_FLOAT32, DHP_FLOAT16, DHP_BFLOAT16})
    if (name == dtype_name(dtype)) return dtype;
  throw std::invalid_argument("dtype: '" + name + "'; supported: float32, float16, bfloat16");
}

static py::dict kernel_dict(const dhp_kernel_info &k) {
  return py::dict("name"_a = k.name, "family"_a = k.family, "entry"_a = k.entry, "part"_a = k.part,
                  "cubin_sha256"_a = k.cubin_sha256, "dtype"_a = dtype_name(k.dtype), "head_dim"_a = k.head_dim,
                  "warpgroups"_a = k.warpgroups, "rows"_a = k.rows, "tile_q"_a = k.tile_q, "tile_k"_a = k.tile_k,
                  "stages"_a = k.stages, "segment_tiles"_a = k.segment_tiles, "is_short"_a = k.is_short != 0,
                  "cluster"_a = k.cluster, "ctas_per_sm"_a = k.ctas_per_sm, "step_cycles"_a = k.step_cycles,
                  "unit_cycles"_a = k.unit_cycles, "threads"_a = k.threads, "shared_bytes"_a = k.shared_bytes,
                  "registers"_a = k.registers, "spill_bytes"_a = k.spill_bytes);
}

static py::list kernels() {
  py::list list;
  for (int i = 0; i < dhp_kernel_count(); i++)
    list.append(kernel_dict(*dhp_kernel(i)));
  return list;
}

static py::bytes cubin(const std::string &name) {
  for (int i = 0; i < dhp_kernel_count(); i++) {
    const dhp_kernel_info &k = *dhp_kernel(i);
    if (name == k.name) return py::bytes(static_cast<const char *>(k.cubin), k.cubin_size);
  }
  throw py::key_error("no kernel named '" + name + "'; kernels() lists those of this build");
}

static dhp_tensor contiguous(const Shape &shape, dhp_dtype dtype) {
  dhp_tensor t{};
  t.dtype = dtype;
  int64_t stride = 1;
  for (int i = 3; i >= 0; i--) {
    t.size[i] = shape[i];
    t.stride[i] = stride;
    /* wraps instead of overflowing for absurd shapes, which validation then refuses by their sizes */
    stride = static_cast<int64_t>(static_cast<uint64_t>(stride) * static_cast<uint64_t>(shape[i]));
  }
  return t;
}

static py::object plan(const Shape &q, const Shape &k, const std::string &dtype, bool is_causal, int64_t causal_offset,
                       int64_t window_left, int64_t window_right) {
  dhp_attention args{};
  args.q = args.out = contiguous(q, dtype_from(dtype));
  args.k = args.v = contiguous(k, args.q.dtype);
  args.scale = 1.f;
  args.is_causal = is_causal;
  args.causal_offset = causal_offset;
  args.is_windowed = window_left != -1 || window_right != -1;
  args.window_left = window_left;
  args.window_right = window_right;
  dhp_plan plan;
  dhp_error error{};
  if (dhp_plan_attention(&args, &plan, &error) != DHP_OK) throw std::invalid_argument(error.text);
  if (!plan.kernel) return py::none();
  return py::dict("kernel"_a = plan.kernel->name, "grid"_a = plan.grid, "items"_a = plan.items,
                  "mirrored"_a = plan.mirrored != 0, "heads_per_tile"_a = plan.heads_per_tile,
                  "q_tiles"_a = plan.q_tiles, "listed_groups"_a = plan.listed_groups, "splits"_a = plan.splits,
                  "parts"_a = plan.parts, "threads"_a = plan.kernel->threads,
                  "shared_bytes"_a = plan.kernel->shared_bytes);
}

static py::list plan_backward(const Shape &q, const Shape &k, const std::string &dtype, bool is_causal,
                              int64_t causal_offset, bool need_dq, bool need_dk, bool need_dv) {
  static float anything; /* what a wanted gradient and an lse point to: no plan reads or writes there */
  dhp_backward args{};
  dhp_attention &forward = args.forward;
  forward.q = forward.out = args.grad_out = args.dq = contiguous(q, dtype_from(dtype));
  forward.k = forward.v = args.dk = args.dv = contiguous(k, forward.q.dtype);
  forward.lse = &anything;
  forward.scale = 1.f;
  forward.is_causal = is_causal;
  forward.causal_offset = causal_offset;
  args.dq.data = need_dq ? &anything : nullptr;
  args.dk.data = need_dk ? &anything : nullptr;
  args.dv.data = need_dv ? &anything : nullptr;
  dhp_backward_plan plan;
  dhp_error error{};
  if (dhp_plan_backward(&args, &plan, &error) != DHP_OK) throw std::invalid_argument(error.text);
  py::list launches;
  for (int i = 0; i < plan.count; i++)
    launches.append(py::dict("kernel"_a = plan.launches[i].kernel->name, "grid"_a = plan.launches[i].grid));
  return launches;
}

static py::object plan_packed(const std::array<int64_t, 3> &q, const std::array<int64_t, 3> &k,
                              const std::string &dtype, int64_t sequences, int64_t max_seqlen_q, int64_t max_seqlen_k,
                              double softcap, bool with_sinks) {
  static const int32_t anything = 0; /* neither lengths nor sinks are looked at by a plan */
  dhp_varlen args{};
  args.packed.q = args.packed.out = contiguous({1, q[1], q[0], q[2]}, dtype_from(dtype));
  args.packed.k = args.packed.v = contiguous({1, k[1], k[0], k[2]}, args.packed.q.dtype);
  args.packed.scale = 1.f;
  args.packed.softcap = softcap;
  args.packed.sinks = with_sinks ? &anything : nullptr;
  args.sequences = sequences;
  args.cu_seqlens_q = args.cu_seqlens_k = &anything;
  args.max_seqlen_q = max_seqlen_q;
  args.max_seqlen_k = max_seqlen_k;
  dhp_packed_plan plan;
  dhp_error error{};
  dhp_status status = dhp_varlen_check(&args, 1, &error);
  if (status == DHP_OK) status = dhp_plan_packed(&args, &plan, &error);
  if (status != DHP_OK) throw std::invalid_argument(error.text);
  if (!plan.kernel) return py::none();
  return py::dict("kernel"_a = plan.kernel->name, "grid"_a = plan.grid, "items"_a = plan.items,
                  "heads_per_tile"_a = plan.heads_per_tile, "rows"_a = plan.rows, "entries"_a = plan.entries);
}

static py::dict build_info() {
  return py::dict("version"_a = DHP_VERSION,
                  "cuda"_a = sizeof(DHP_NVCC_VERSION) > 1 ? py::object(py::str(DHP_NVCC_VERSION)) : py::none(),
                  "compiler"_a = DHP_COMPILER, "max_head_dim_cuda"_a = dhp_cuda_max_head_dim(),
                  "sources"_a = py::module_::import("json").attr("loads")(DHP_SOURCES));
}

PYBIND11_MODULE(_inspect, m) {
  m.doc() = "What this build of dhp_safe_fa ships, and what it would launch. Host only: no tensor passes here.";
  m.def("kernels", &kernels,
        "The shipped GPU kernels, one dict each: name, family, entry, part, cubin_sha256, dtype, head_dim, warpgroups, "
        "rows (of a warpgroup), tile_q, tile_k, stages, segment_tiles, is_short, cluster, ctas_per_sm, step_cycles, "
        "unit_cycles, threads, shared_bytes, registers, spill_bytes. Empty in a build without nvcc.");
  m.def("cubin", &cubin, "name"_a, "The machine code of one shipped kernel, an ELF file. KeyError for another name.");
  m.def("plan", &plan, "q_shape"_a, "k_shape"_a, "dtype"_a, "is_causal"_a = false, "causal_offset"_a = 0,
        "window_left"_a = -1, "window_right"_a = -1,
        "The launch for q of shape [B, Hq, Sq, D] and k, v of shape [B, Hk, Sk, D] on a Hopper GPU: kernel, grid, "
        "items (query tiles, or two of them), mirrored, heads_per_tile, q_tiles, listed_groups, splits, parts, "
        "threads, shared_bytes; None for an empty output. ValueError names what is wrong.");
  m.def("plan_packed", &plan_packed, "q_shape"_a, "k_shape"_a, "dtype"_a, "sequences"_a, "max_seqlen_q"_a,
        "max_seqlen_k"_a, "softcap"_a = 0., "with_sinks"_a = false,
        "The launch for packed q [tokens, Hq, D] and k, v [tokens, Hk, D] on a Hopper GPU: kernel, grid, items, "
        "heads_per_tile, rows (of a query tile), entries (of the list of query tiles); None for an empty output. "
        "ValueError names what is wrong.");
  m.def("plan_backward", &plan_backward, "q_shape"_a, "k_shape"_a, "dtype"_a, "is_causal"_a = false,
        "causal_offset"_a = 0, "need_dq"_a = true, "need_dk"_a = true, "need_dv"_a = true,
        "The launches for the gradients of such a call on a Hopper GPU, in order: kernel, grid. ValueError names what "
        "is wrong.");
  m.def(
      "build_info", &build_info,
      "version, cuda (nvcc's version or None), compiler, max_head_dim_cuda; sources: SHA-256 of what was built: all of "
      "csrc and setup.py, and of these what takes part in a launch, by family.");
}
