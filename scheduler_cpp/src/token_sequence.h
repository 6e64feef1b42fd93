// A request's tokens, prompt first, and the keys of its full pages. Each key is computed once, when its page fills up.
// `Append` never allocates after `Reserve`, so a returned step can always be recorded.
#pragma once

#include <span>
#include <vector>

#include "hash.h"
#include "types.h"

namespace tokenspeed {

class TokenSequence {
 public:
  // `keyed` false: no keys are kept (prefix caching is off). Fewer than 128 `key_bits` make keys collide.
  TokenSequence(std::span<const Token> prompt, int page_size, const PageKey& root, bool keyed, int key_bits = 128)
      : ids_(prompt.begin(), prompt.end()),
        prompt_(static_cast<int>(prompt.size())),
        page_size_(page_size),
        keyed_(keyed),
        key_bits_(key_bits),
        root_(root),
        last_key_(root) {
    keys_.reserve(static_cast<std::size_t>(keyed ? prompt_ / page_size : 0));
    ExtendKeys();
  }

  // Room for `total` tokens. Strong guarantee.
  void Reserve(int total) {
    ids_.reserve(static_cast<std::size_t>(total));
    if (keyed_) keys_.reserve(static_cast<std::size_t>(total / page_size_));
  }

  void Append(Token token) noexcept {
    ids_.push_back(token);
    if (static_cast<int>(ids_.size()) % page_size_ == 0) ExtendKeys();
  }

  int size() const noexcept { return static_cast<int>(ids_.size()); }
  int prompt() const noexcept { return prompt_; }
  int outputs() const noexcept { return size() - prompt_; }
  Token operator[](int at) const noexcept { return ids_[static_cast<std::size_t>(at)]; }
  const Token* page(int index) const noexcept { return ids_.data() + static_cast<std::ptrdiff_t>(index) * page_size_; }
  std::span<const Token> ids() const noexcept { return ids_; }
  std::span<const PageKey> keys() const noexcept { return keys_; }
  // Pages a prefix hit may supply: at least one token is left to compute, since its output samples the next token.
  int reusable_pages() const noexcept { return (size() - 1) / page_size_; }

 private:
  void ExtendKeys() noexcept {
    if (!keyed_) return;
    for (auto page = keys_.size(); page < ids_.size() / static_cast<std::size_t>(page_size_); ++page) {
      last_key_ = ChainKey(last_key_, {this->page(static_cast<int>(page)), static_cast<std::size_t>(page_size_)});
      if (key_bits_ < 128) last_key_ = Truncated(last_key_, key_bits_, root_);
      keys_.push_back(last_key_);
    }
  }

  std::vector<Token> ids_;
  std::vector<PageKey> keys_;
  int prompt_;
  int page_size_;
  bool keyed_;
  int key_bits_;
  PageKey root_;
  PageKey last_key_;  // the root key until the first page is full
};

}  // namespace tokenspeed
