// Page keys: the published SipHash vectors, and the bytes that this project promised.
#include "hash.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <string>

namespace tokenspeed {
namespace {

std::string Hex(const PageKey& key) {
  std::string hex;
  for (std::uint64_t word : {key.lo, key.hi})
    for (int byte = 0; byte < 8; ++byte) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(word >> (8 * byte) & 0xff));
      hex += digits;
    }
  return hex;
}

TEST(SipHash, MatchesTheReferenceVectors) {
  std::array<std::byte, 16> message;
  for (int i = 0; i < 16; ++i) message[static_cast<std::size_t>(i)] = static_cast<std::byte>(i);
  auto hash = [&](std::size_t length) {
    return Hex(SipHash128(0x0706050403020100ULL, 0x0f0e0d0c0b0a0908ULL, std::span(message).first(length)));
  };
  // vectors_sip128 of the reference implementation: key 00..0f, message 00..length-1.
  EXPECT_EQ(hash(0), "a3817f04ba25a8e66df67214c7550293");
  EXPECT_EQ(hash(1), "da87c1d86b99af44347659119b22fc45");
  EXPECT_EQ(hash(2), "8177228da4a45dc7fca38bdef60affe4");
}

TEST(PageKey, IsSipHashOfParentAndTokens) {
  // The word-wise form that the planner uses equals the byte-wise definition, for even and odd page sizes.
  const PageKey parent{0x0123456789abcdefULL, 0xfedcba9876543210ULL};
  for (int page_size : {1, 2, 3, 16, 63, 64}) {
    std::vector<Token> tokens(static_cast<std::size_t>(page_size));
    std::iota(tokens.begin(), tokens.end(), 70'000);
    std::vector<std::byte> message;
    auto put = [&](auto value) {
      for (std::size_t i = 0; i < sizeof(value); ++i)
        message.push_back(static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i) & 0xff));
    };
    put(parent.lo);
    put(parent.hi);
    for (Token token : tokens) put(token);
    EXPECT_EQ(ChainKey(parent, tokens), SipHash128(0x746f6b656e737064ULL + 1, 0x706167652d6b6579ULL, message));
  }
}

TEST(RootKey, SeparatesDomains) {
  const PageKey none = RootKey({});
  const PageKey empty = RootKey({{KeyTag::kCacheSalt, ""}});
  const PageKey salted = RootKey({{KeyTag::kCacheSalt, "a"}});
  const PageKey other_tag = RootKey({{static_cast<KeyTag>(2), "a"}});
  const PageKey twice = RootKey({{KeyTag::kCacheSalt, "a"}, {KeyTag::kCacheSalt, ""}});
  const std::array keys{none, empty, salted, other_tag, twice};
  for (std::size_t i = 0; i < keys.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(keys[i] == keys[j]);
}

}  // namespace
}  // namespace tokenspeed
