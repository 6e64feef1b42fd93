// Transfers between tiers. A ticket is the scheduler's side of one: it pins both ends until the executor says how many
// of its pages arrived, which happens once; a second word about the same ticket is ignored. A page named by a ticket is
// never evicted, reused or written meanwhile, so the executor may copy beside its steps.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "page_pool.h"
#include "prefix_cache.h"
#include "token_sequence.h"
#include "types.h"

namespace tokenspeed {

enum class TransferKind : std::uint8_t {
  kWriteBack,  // device -> host
  kLoadBack,   // host -> device
  kPrefetch,   // storage -> host
  kBackup,     // host -> storage
};
inline constexpr std::size_t kTransferKinds = 4;

constexpr std::string_view NameOf(TransferKind kind) noexcept {
  constexpr std::string_view kNames[kTransferKinds] = {"write_back", "load_back", "prefetch", "backup"};
  return kNames[static_cast<std::size_t>(kind)];
}

// What the executor is to do: page i of `from` to page i of `to`, in order. A host page and a stored one keep what all
// layers hold of a page; where windowed layers have pages of their own, `window` names those beside the `device` ones.
struct Transfer {
  TicketId ticket = 0;
  TransferKind kind = TransferKind::kWriteBack;
  int group = 0;                    // home group
  RequestId request = -1;           // -1: of none
  std::vector<PageId> device = {};  // empty for kPrefetch and kBackup
  std::vector<PageId> window = {};  // as `device`; kNoPage: that part is not copied. Empty where there is no window
  std::vector<PageId> host = {};
  std::vector<PageKey> keys = {};
};

// A transfer in flight. Move-only. Where its pages come from and go to:
//   kWriteBack  the nodes `source` below `device`'s path -> `filling`, to hang below `host`
//   kLoadBack   the last `pages` nodes of the path to `host` -> pages that the run owns
//   kPrefetch   storage -> `filling`, to hang below `host`
//   kBackup     `pages` nodes at the end of the path to `host` -> storage
struct Ticket {
  TicketId id = -1;
  TransferKind kind = TransferKind::kWriteBack;
  int pages = 0;
  NodeRef device = {};
  NodeRef host = {};
  std::vector<PageId> source = {};
  std::vector<OwnedPage> filling = {};
  WindowPins window = {};  // beside `source`

  // The first `arrived` pages of a write-back are on the host: they become nodes, and `host` the deepest of them.
  void FinishWriteBack(int arrived) noexcept {
    PrefixCache& from = *device.cache();
    for (PageId page : source) from.SetCopying(page, false);
    for (int i = 0; i < arrived; ++i) {
      const PageId page = source[static_cast<std::size_t>(i)];
      const auto at = static_cast<std::size_t>(i);
      const bool whole = window.pages().empty() || window.pages()[at] != kNoPage;
      Hang(from.KeyOf(page), from.TokensOf(page).data(), i, whole);
    }
    filling.clear();
    window = {};
  }

  // The first `arrived` pages of a prefetch, which hold `tokens` from page `host.depth()` on, are on the host.
  void FinishPrefetch(const TokenSequence& tokens, int arrived) noexcept {
    const int first = host.depth();
    for (int i = 0; i < arrived; ++i)
      Hang(tokens.keys()[static_cast<std::size_t>(first + i)], tokens.page(first + i), i, true);
    filling.clear();
  }

  // Of a load-back, only the first `arrived` pages could be read: the host's copy of the next one is given up.
  void ForgetFrom(int arrived) noexcept {
    PageId node = host.node();
    for (int i = pages - 1; i > arrived; --i) node = host.cache()->Parent(node);
    host.cache()->Forget(node);
  }

 private:
  // A twin that came meanwhile is used instead, and this copy goes back. `whole`: with its window part.
  void Hang(const PageKey& key, const Token* tokens, int index, bool whole) noexcept {
    PrefixCache& cache = *host.cache();
    const PageId twin = cache.FindChild(host.node(), key, tokens);
    if (twin != kNoPage) return cache.Descend(host, twin);
    cache.Insert(host, key, tokens, std::move(filling[static_cast<std::size_t>(index)]));
    if (whole) cache.window().Mark(host.node());
  }
};

}  // namespace tokenspeed
