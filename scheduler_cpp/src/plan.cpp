#include "plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "digest.h"

namespace tokenspeed {
namespace {

struct Header {
  std::uint64_t magic;
  std::uint64_t digest;
  std::int64_t step;
  std::int32_t dp, bucket, rows, width, loads, windows;
  std::uint64_t bytes;  // of the whole packed plan
};
static_assert(sizeof(Header) == 56 && std::is_trivially_copyable_v<Header>);
static_assert(std::endian::native == std::endian::little, "the packed form is little endian");

constexpr std::uint64_t kMagic = 0x34304e414c505354ULL;  // "TSPLAN04"

std::size_t PackedSize(const PlanShape& shape) {
  return sizeof(Header) + shape.requests() * (sizeof(std::int64_t) + 5 * sizeof(std::int32_t) + 1) +
         static_cast<std::size_t>(shape.loads) * sizeof(std::int64_t) +
         (4 * shape.tokens() + 2 * static_cast<std::size_t>(shape.dp) + shape.cells()) * sizeof(std::int32_t) +
         static_cast<std::size_t>(shape.windows) * (shape.tokens() + shape.cells()) * sizeof(std::int32_t);
}

}  // namespace

PlanBuffer::PlanBuffer(int dp, int max_bucket, int max_rows, int width, int windows)
    : max_tokens_(static_cast<std::size_t>(dp) * static_cast<std::size_t>(max_bucket)),
      max_requests_(static_cast<std::size_t>(dp) * static_cast<std::size_t>(max_rows)),
      dp_(static_cast<std::size_t>(dp)),
      width_(width),
      windows_(windows) {
  const std::size_t cells = max_requests_ * static_cast<std::size_t>(width), more = static_cast<std::size_t>(windows);
  bytes_.reset(new std::byte[max_requests_ * (2 * sizeof(std::int64_t) + 5 * sizeof(std::int32_t) + 1) +
                             ((4 + more) * max_tokens_ + 2 * dp_ + (1 + more) * cells) * sizeof(std::int32_t)]);
  tags_ = std::make_unique<RowTag[]>((1 + more) * max_requests_);
  const PlanArrays arrays = Arrays({dp, max_bucket, max_rows, width, 0, windows});
  std::ranges::fill(arrays.table, kNoPage);
  std::ranges::fill(arrays.window_table, kNoPage);
}

PlanArrays PlanBuffer::Arrays(const PlanShape& shape) const noexcept {
  PlanArrays arrays;
  std::byte* at = bytes_.get();
  auto take = [&]<class T>(std::span<T>& array, std::size_t capacity, std::size_t size) {
    array = {reinterpret_cast<T*>(at), size};
    at += capacity * sizeof(T);
  };
  const std::size_t dp = dp_, t = shape.tokens(), s = shape.requests();
  const auto windows = static_cast<std::size_t>(shape.windows);
  take(arrays.request_ids, max_requests_, s);
  take(arrays.loads, max_requests_, static_cast<std::size_t>(shape.loads));
  for (auto* array : {&arrays.ids, &arrays.pos, &arrays.slot, &arrays.row}) take(*array, max_tokens_, t);
  for (auto* array : {&arrays.last, &arrays.request_slots, &arrays.out_pos, &arrays.load_state, &arrays.save_state})
    take(*array, max_requests_, s);
  for (auto* array : {&arrays.num_tokens, &arrays.num_rows}) take(*array, dp, dp);
  take(arrays.window_slot, windows * max_tokens_, windows * t);
  take(arrays.table, max_requests_ * static_cast<std::size_t>(width_), shape.cells());
  take(arrays.window_table, windows * max_requests_ * static_cast<std::size_t>(width_), windows * shape.cells());
  take(arrays.new_rows, max_requests_, s);
  return arrays;
}

void PlanBuffer::WriteRow(Table table, std::size_t index, std::uint64_t content,
                          std::span<const PageId> pages) noexcept {
  const bool full = table == Table::kFull;
  RowTag& tag = tags_[full ? index : max_requests_ + index];
  const auto filled = static_cast<std::size_t>(tag.filled);
  if (tag.content == content && filled == pages.size()) return;
  const auto width = static_cast<std::size_t>(width_);
  const PlanArrays arrays = Arrays({static_cast<int>(dp_), 0, 0, width_, 0, windows_});
  PageId* cells = (full ? arrays.table : arrays.window_table).data() + index * width;
  const std::size_t kept = tag.content == content && filled < pages.size() ? filled : 0;
  std::ranges::copy(pages.subspan(kept), cells + kept);
  if (filled > pages.size()) std::fill(cells + pages.size(), cells + filled, kNoPage);
  tag = {content, static_cast<int>(pages.size())};
}

Plan::Plan(std::shared_ptr<PlanBuffer> buffer, StepId step, const PlanShape& shape) noexcept
    : buffer_(std::move(buffer)), step_(step), shape_(shape), arrays_(buffer_->Arrays(shape)) {
  buffer_->in_use.store(true, std::memory_order_relaxed);
}

std::uint64_t Plan::DigestWith(std::span<const std::uint64_t> row_digests) const noexcept {
  Digest digest;
  digest.Add(static_cast<std::uint64_t>(step_));
  for (int size : {shape_.dp, shape_.bucket, shape_.rows, shape_.width, shape_.loads, shape_.windows})
    digest.Add(static_cast<std::uint64_t>(size));
  arrays_.ForEachButTables([&]<class T>(std::span<T> array) { digest.Add(std::span<const T>(array)); });
  digest.Add(row_digests);
  return digest.value();
}

void Plan::Seal(std::span<const std::uint64_t> row_digests) noexcept { digest_ = DigestWith(row_digests); }

std::size_t Plan::packed_size() const noexcept { return PackedSize(shape_); }

void Plan::Pack(std::span<std::byte> out) const {
  if (out.size() < packed_size())
    throw std::invalid_argument("a plan of " + std::to_string(packed_size()) + " bytes does not fit into a buffer of " +
                                std::to_string(out.size()));
  const Header header{kMagic,      digest_,      step_,        shape_.dp,      shape_.bucket,
                      shape_.rows, shape_.width, shape_.loads, shape_.windows, packed_size()};
  std::byte* at = out.data();
  auto put = [&](const void* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(at, from, bytes);
    at += bytes;
  };
  put(&header, sizeof(header));
  arrays_.ForEachButTables([&](auto array) { put(array.data(), array.size_bytes()); });
  for (auto table : {arrays_.table, arrays_.window_table}) put(table.data(), table.size_bytes());
}

Plan Plan::Unpack(std::span<const std::byte> bytes) {
  auto refuse = [](const std::string& why) { throw std::invalid_argument("not a packed plan: " + why); };
  Header header;
  if (bytes.size() < sizeof(header)) refuse("it has " + std::to_string(bytes.size()) + " bytes, fewer than a header");
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != kMagic) refuse("the magic number is wrong (another version, or never written)");
  const PlanShape shape{header.dp, header.bucket, header.rows, header.width, header.loads, header.windows};
  // Each factor is bounded by the size of the buffer first, so that the products below cannot overflow.
  const auto bound = static_cast<std::int64_t>(bytes.size());
  for (std::int64_t size : {header.dp, header.bucket, header.rows, header.width})
    if (size < 1 || size > bound) refuse("a size in its header is out of range");
  if (header.windows < 0 || header.windows > 1 || header.loads < 0 ||
      header.loads > std::int64_t{header.dp} * header.rows || std::int64_t{header.dp} * header.bucket > bound ||
      std::int64_t{header.dp} * header.rows > bound || std::int64_t{header.dp} * header.rows > bound / header.width ||
      PackedSize(shape) != header.bytes || header.bytes > bytes.size())
    refuse("its header promises more bytes than the " + std::to_string(bytes.size()) + " given (truncated?)");

  Plan plan(std::make_shared<PlanBuffer>(shape.dp, shape.bucket, shape.rows, shape.width, shape.windows), header.step,
            shape);
  const std::byte* at = bytes.data() + sizeof(header);
  auto get = [&](auto array) {
    if (!array.empty()) std::memcpy(array.data(), at, array.size_bytes());
    at += array.size_bytes();
  };
  plan.arrays_.ForEachButTables(get);
  std::vector<std::uint64_t> row_digests;
  row_digests.reserve(2 * shape.requests());
  const auto width = static_cast<std::size_t>(shape.width);
  for (auto table : {plan.arrays_.table, plan.arrays_.window_table}) {
    get(table);
    for (std::size_t at = 0; at < table.size(); at += width) row_digests.push_back(RowDigest(table.subspan(at, width)));
  }
  plan.Seal(row_digests);
  if (plan.digest_ != header.digest)
    refuse("the digest is wrong: the bytes were changed or torn after the plan of step " + std::to_string(header.step) +
           " was packed");
  return plan;
}

}  // namespace tokenspeed
