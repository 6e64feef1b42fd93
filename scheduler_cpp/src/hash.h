// Page keys. A key depends only on bytes that are written down here (little endian, versioned), never on the process,
// the platform or the run, so a router or a storage tier can compute the same key. SipHash-2-4 with 128-bit output
// (Aumasson and Bernstein, "SipHash: a fast short-input PRF", and its reference implementation) is keyed with a fixed
// version constant; tenants are separated by the salt in the root key, and a match compares the tokens as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "types.h"

namespace tokenspeed {

inline constexpr int kPageKeyVersion = 1;  // bump when any byte that enters a key changes

// SipHash-2-4-128 of `bytes` under the 128-bit key (k0, k1).
PageKey SipHash128(std::uint64_t k0, std::uint64_t k1, std::span<const std::byte> bytes) noexcept;

enum class KeyTag : std::uint64_t { kCacheSalt = 1 };  // one tag a domain: equal bytes under two tags differ

struct KeyField {
  KeyTag tag;
  std::string_view bytes;
};

// The parent key of a sequence's first page: version and every extra field, each as (tag, length, bytes).
PageKey RootKey(std::initializer_list<KeyField> fields);

// The key cut to `bits` (0..63) bits, as a short hash would be, to prove that a collision shares nothing. What is left
// of `root`, the domain, is whole: a match compares tokens, so it is they that a key need not tell apart.
constexpr PageKey Truncated(const PageKey& key, int bits, const PageKey& root) noexcept {
  return {key.lo & ((std::uint64_t{1} << bits) - 1), root.hi};
}

// The key of the page that holds `tokens` after the prefix that `parent` stands for.
PageKey ChainKey(const PageKey& parent, std::span<const Token> tokens) noexcept;

}  // namespace tokenspeed
