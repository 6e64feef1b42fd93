#include "hash.h"

#include <bit>
#include <string>

namespace tokenspeed {
namespace {

class Sip {
 public:
  Sip(std::uint64_t k0, std::uint64_t k1) noexcept
      : v0_(k0 ^ 0x736f6d6570736575ULL),
        v1_(k1 ^ 0x646f72616e646f6dULL ^ 0xee),
        v2_(k0 ^ 0x6c7967656e657261ULL),
        v3_(k1 ^ 0x7465646279746573ULL) {}

  void Word(std::uint64_t m) noexcept {
    v3_ ^= m;
    Round();
    Round();
    v0_ ^= m;
    length_ += 8;
  }

  // `tail` holds the last `bytes` (0..7) bytes of the message, little endian.
  PageKey Finish(std::uint64_t tail, int bytes) noexcept {
    Word(tail | ((length_ + static_cast<std::uint64_t>(bytes)) << 56));
    v2_ ^= 0xee;
    for (int i = 0; i < 4; ++i) Round();
    const std::uint64_t lo = v0_ ^ v1_ ^ v2_ ^ v3_;
    v1_ ^= 0xdd;
    for (int i = 0; i < 4; ++i) Round();
    return {lo, v0_ ^ v1_ ^ v2_ ^ v3_};
  }

 private:
  void Round() noexcept {
    v0_ += v1_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v3_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ += v3_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ += v1_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v2_ = std::rotl(v2_, 32);
  }

  std::uint64_t v0_, v1_, v2_, v3_;
  std::uint64_t length_ = 0;
};

// The version is part of the key; the two words spell "tokenspd" and "page-key".
constexpr std::uint64_t kKey0 = 0x746f6b656e737064ULL + kPageKeyVersion;
constexpr std::uint64_t kKey1 = 0x706167652d6b6579ULL;
constexpr std::uint64_t kRootDomain = 0x726f6f7400000000ULL;  // a root key never equals a page key's input domain

std::uint64_t Pair(Token low, Token high) noexcept {
  return static_cast<std::uint32_t>(low) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32;
}

}  // namespace

PageKey SipHash128(std::uint64_t k0, std::uint64_t k1, std::span<const std::byte> bytes) noexcept {
  Sip sip(k0, k1);
  auto load = [&](std::size_t at, std::size_t count) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < count; ++i) word |= std::to_integer<std::uint64_t>(bytes[at + i]) << (8 * i);
    return word;
  };
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) sip.Word(load(at, 8));
  return sip.Finish(load(at, bytes.size() - at), static_cast<int>(bytes.size() - at));
}

PageKey RootKey(std::initializer_list<KeyField> fields) {
  std::string message;
  auto put = [&](std::uint64_t word) {
    for (int i = 0; i < 8; ++i) message.push_back(static_cast<char>(word >> (8 * i)));
  };
  for (const KeyField& field : fields) {
    put(static_cast<std::uint64_t>(field.tag));
    put(field.bytes.size());
    message.append(field.bytes);
  }
  return SipHash128(kKey0 ^ kRootDomain, kKey1, std::as_bytes(std::span(message)));
}

PageKey ChainKey(const PageKey& parent, std::span<const Token> tokens) noexcept {
  Sip sip(kKey0, kKey1);
  sip.Word(parent.lo);
  sip.Word(parent.hi);
  std::size_t i = 0;
  for (; i + 2 <= tokens.size(); i += 2) sip.Word(Pair(tokens[i], tokens[i + 1]));
  return i < tokens.size() ? sip.Finish(Pair(tokens[i], 0), 4) : sip.Finish(0, 0);
}

}  // namespace tokenspeed
