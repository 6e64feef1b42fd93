// The prefix tree over one tier's pages: a node is one full, computed page and is named by that page's id. A page can
// be reached only through its parent, its key AND its tokens, so a colliding key never shares a page. A pin on a node
// keeps the whole path to it; only unpinned leaves are evicted, so the cached set is always closed under "parent".
//
// `active` of a node counts its pins plus its children that are active. A pin therefore costs O(1) where the path is
// already in use, and `evictable` (nodes with active = 0) is exact at all times: what admission counts on can be drawn.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kv_events.h"
#include "lru_heap.h"
#include "page_pool.h"
#include "snapshots.h"
#include "types.h"
#include "window_pages.h"

namespace tokenspeed {

class PrefixCache;

// A pin on one node (kNoPage: the root, which needs none). Move-only; unpins when dropped. A default one is of no
// cache: there is no such tier.
class NodeRef {
 public:
  NodeRef() noexcept = default;
  explicit NodeRef(PrefixCache& cache) noexcept : cache_(&cache) {}
  NodeRef(NodeRef&& other) noexcept : cache_(other.cache_), node_(std::exchange(other.node_, kNoPage)) {}
  NodeRef& operator=(NodeRef&& other) noexcept {
    std::swap(cache_, other.cache_);
    std::swap(node_, other.node_);
    return *this;
  }
  ~NodeRef();

  PageId node() const noexcept { return node_; }
  PrefixCache* cache() const noexcept { return cache_; }
  int depth() const noexcept;        // pages from the root to the node; 0 at the root, and of no cache
  NodeRef Another() const noexcept;  // a second pin on the same node

 private:
  friend class PrefixCache;
  PrefixCache* cache_ = nullptr;
  PageId node_ = kNoPage;
};

class PrefixCache {
 public:
  // `snapshots`: of recurrent states, to be kept beside pages, as window pages from `window_pool` are (null: they lie
  // in the pages). What comes and goes is told to `log` under `name`.
  PrefixCache(PagePool& pool, int page_size, int snapshots = 0, KvEventLog* log = nullptr, KvEvent name = {},
              Window window = {}, PagePool* window_pool = nullptr);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;
  ~PrefixCache();

  int cached() const noexcept { return cached_; }
  int evictable() const noexcept { return evictable_; }
  std::int64_t evicted_total() const noexcept { return evicted_total_; }

  // The longest cached path of `keys` (one a full page; `tokens` are the same pages' tokens), written to `path`.
  // Read-only: neither pins nor the order of eviction change.
  void Match(std::span<const PageKey> keys, std::span<const Token> tokens, std::vector<PageId>& path) const;
  // How many leading pages of `keys` are cached, by bisection: a page is cached with all before it. By key alone, so it
  // says what is worth a match, and no more.
  int Reach(std::span<const PageKey> keys) const noexcept;
  // Pages at the end of `path` that nobody uses: pinning the path takes so many out of evictable().
  int IdlePages(std::span<const PageId> path) const noexcept;
  // The child of `parent` with this key and these tokens (page_size of them), or kNoPage.
  PageId FindChild(PageId parent, const PageKey& key, const Token* tokens) const noexcept;

  // Cuts `path` to the longest part that every cache group can take up: the window group where the pages before its end
  // have window pages, recurrent layers where its last page has a snapshot.
  void Resumable(std::vector<PageId>& path) const noexcept;
  Snapshots& snapshots() noexcept { return snapshots_; }
  const Snapshots& snapshots() const noexcept { return snapshots_; }
  WindowPages& window() noexcept { return window_; }
  const WindowPages& window() const noexcept { return window_; }

  int Depth(PageId node) const noexcept { return node == kNoPage ? 0 : At(node).depth; }
  PageId Parent(PageId node) const noexcept { return At(node).parent; }
  const PageKey& KeyOf(PageId page) const noexcept { return At(page).key; }
  // The last `path.size()` nodes of the path to `node`, in token order.
  void PathTo(PageId node, std::span<PageId> path) const noexcept;

  [[nodiscard]] NodeRef Pin(PageId node) noexcept;
  // Moves a pin one page down, to an existing child of its node.
  void Descend(NodeRef& ref, PageId child) noexcept;
  // Moves a pin one page down, to a new child that takes `page`. Never allocates.
  void Insert(NodeRef& ref, const PageKey& key, const Token* tokens, OwnedPage page) noexcept;

  // The node can no longer be found, nor what hangs below it: its contents are not to be trusted. Users keep it until
  // they drop their pins.
  void Forget(PageId node) noexcept;

  // Whether a transfer is copying the page to the next tier; a mark that the transfer sets and takes back.
  bool IsCopying(PageId page) const noexcept { return At(page).copying; }
  void SetCopying(PageId page, bool copying) noexcept { At(page).copying = copying; }

  // Returns the least recently used unpinned leaf to the pool; false when there is none.
  bool EvictOne() noexcept;
  // Returns every unpinned page to the pool; the number of pages returned.
  int Flush() noexcept;
  // Starts a new access epoch: pages that fall out of use from here on are younger than all before.
  void Tick() noexcept {
    ++epoch_;
    window_.Tick();
  }

  // For the invariant checker. `pins` holds the expected number of pins a node. Throws std::logic_error.
  void Check(std::span<const int> pins) const;
  bool IsCached(PageId page) const noexcept { return At(page).depth > 0; }
  std::span<const Token> TokensOf(PageId page) const noexcept {
    return std::span(tokens_).subspan(static_cast<std::size_t>(page) * page_size_, page_size_);
  }

 private:
  friend class NodeRef;
  friend struct Fingerprint;  // tests: the canonical form of a state

  struct Node {
    PageKey key;
    std::uint64_t epoch = 0;  // the access epoch in which the node last fell out of use
    PageId parent = kNoPage;
    int depth = 0;  // pages from the root, itself included; 0: this page is not in the tree
    int children = 0;
    int active = 0;
    bool forgotten = false;  // not in the index
    bool copying = false;
  };
  struct IndexEntry {
    std::uint32_t tag = 0;
    PageId page = kNoPage;
  };

  Node& At(PageId page) noexcept { return nodes_[static_cast<std::size_t>(page)]; }
  const Node& At(PageId page) const noexcept { return nodes_[static_cast<std::size_t>(page)]; }
  std::size_t Home(const PageKey& key) const noexcept { return key.lo & mask_; }
  static std::uint32_t Tag(const PageKey& key) noexcept { return static_cast<std::uint32_t>(key.hi); }
  void Activate(PageId node) noexcept;
  void Deactivate(PageId node) noexcept;
  void IndexErase(PageId page) noexcept;
  void Evict(PageId page) noexcept;
  void Tell(KvEvent::Kind kind, PageId page) noexcept;

  PagePool& pool_;
  std::size_t page_size_;
  std::vector<Node> nodes_;        // by page id
  std::vector<Token> tokens_;      // page_size a page, by page id
  std::vector<IndexEntry> index_;  // open addressing with linear probing, load <= 1/2
  std::size_t mask_;
  LruHeap leaves_;
  Snapshots snapshots_;
  WindowPages window_;
  KvEventLog* log_;
  KvEvent name_;  // tier and group
  std::uint64_t epoch_ = 0;
  int cached_ = 0;
  int evictable_ = 0;
  std::int64_t evicted_total_ = 0;
};

inline NodeRef::~NodeRef() {
  if (node_ != kNoPage) cache_->Deactivate(node_);
}
inline int NodeRef::depth() const noexcept { return node_ == kNoPage ? 0 : cache_->Depth(node_); }
inline NodeRef NodeRef::Another() const noexcept { return cache_ == nullptr ? NodeRef() : cache_->Pin(node_); }

}  // namespace tokenspeed
