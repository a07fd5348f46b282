// A device whose memory is the host's and whose operators are the CPU's: what mixes it with the CPU fails as on a GPU,
// and what would make the host wait for a GPU is counted. Torch's device PrivateUse1, made for such backends.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <set>

namespace {

using at::Tensor;
using c10::SymIntArrayRef;
constexpr auto kKind = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kKind, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
std::vector<std::string> waits;

// ---------------------------------------------------------------- one device, one stream, memory of the host

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kKind> {
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kKind, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = memory.allocate(bytes);
    if (storage.data()) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(data));
    const_cast<c10::Storage&>(storage).set_nbytes(bytes);
  }
};
Hooks hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---------------------------------------------------------------- tensors, their views and copies

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           kKeys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                         self.key_set(), self.dtype());
  auto start = offset ? offset->expect_int() : self.storage_offset();
  result.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                      start);
  return result;
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return as_strided(self, size, stride, self.sym_storage_offset());
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes()) / self.element_size();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return self;
}

Tensor on_host(const Tensor& self) {
  if (self.device().type() != kKind) return self;
  return at::from_blob(self.data_ptr(), self.sizes(), self.strides(), self.options().device(at::kCPU));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (!non_blocking && to.device().type() != kKind) waits.push_back("copy to the host");
  if (!non_blocking && self.device().type() != kKind) waits.push_back("copy from the host");
  on_host(to).copy_(on_host(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, /*non_blocking=*/true);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  waits.push_back("item");
  return on_host(self).item();
}

// ---------------------------------------------------------------- all other operators

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> kAsking = {  // for the size of their result, which the host has to know
      "aten::nonzero", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::masked_select", "aten::equal", "aten::bincount", "aten::repeat_interleave"};
  const auto& name = op.schema().name();
  bool here = false, waits_for_it = kAsking.count(name);
  std::string elsewhere;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kKind) here = true;
    else if (tensor.dim() > 0) elsewhere = tensor.device().str();  // numbers without dimensions may lie on the host
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) look(tensor);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor> index : value.toOptionalTensorList()) if (index) {
        look(*index);
        waits_for_it |= index->defined() && index->scalar_type() == at::kBool;  // a mask becomes places
      }
  }
  TORCH_CHECK(!here || elsewhere.empty(), "Expected all tensors to be on the same device, and ", name, " got ",
              kDevice.str(), " and ", elsewhere);
  auto seen = waits;
  if (waits_for_it) seen.push_back(name);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/false);  // its own copies are no waits
  waits = seen;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// ---------------------------------------------------------------- autocast, by CUDA's lists

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_UNLESS_SAID(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_UNLESS_SAID)
  AT_FORALL_PROMOTE(PROMOTED)
}

}  // namespace

TORCH_LIBRARY(pretended_gpu, m) {
  m.def("waits", []() { return waits; });
  m.def("forget", []() { waits.clear(); });
}
