#include "prefix_cache.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "fatal.h"

namespace tokenspeed {

PrefixCache::PrefixCache(PagePool& pool, int page_size, int snapshots, KvEventLog* log, KvEvent name, Window window,
                         PagePool* window_pool)
    : pool_(pool),
      page_size_(static_cast<std::size_t>(page_size)),
      nodes_(static_cast<std::size_t>(pool.total())),
      tokens_(nodes_.size() * page_size_),
      index_(std::bit_ceil(2 * nodes_.size())),
      mask_(index_.size() - 1),
      leaves_(pool.total()),
      snapshots_(snapshots, pool.total()),
      window_(window, window_pool, pool.total()),
      log_(log),
      name_(name) {}

PrefixCache::~PrefixCache() {
  log_ = nullptr;
  Flush();
  if (cached_ != 0) Fatal("a prefix cache was destroyed while a node was pinned");
}

PageId PrefixCache::FindChild(PageId parent, const PageKey& key, const Token* tokens) const noexcept {
  for (std::size_t at = Home(key); index_[at].page != kNoPage; at = (at + 1) & mask_) {
    if (index_[at].tag != Tag(key)) continue;
    const PageId page = index_[at].page;
    const Node& node = At(page);
    // The parent is checked by identity, so by induction every token of the path is compared.
    if (node.key == key && node.parent == parent && std::equal(tokens, tokens + page_size_, TokensOf(page).begin()))
      return page;
  }
  return kNoPage;
}

void PrefixCache::Match(std::span<const PageKey> keys, std::span<const Token> tokens, std::vector<PageId>& path) const {
  // The keys are known in advance, so the three cache misses of a page (index, node, tokens) are fetched ahead.
  constexpr std::size_t kFar = 16, kNear = 8;
  path.clear();
  PageId parent = kNoPage;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kFar < keys.size()) __builtin_prefetch(&index_[Home(keys[i + kFar])]);
    if (i + kNear < keys.size()) {
      const PageId ahead = index_[Home(keys[i + kNear])].page;
      if (ahead != kNoPage) {
        __builtin_prefetch(&At(ahead));
        __builtin_prefetch(TokensOf(ahead).data());
      }
    }
    const PageId page = FindChild(parent, keys[i], tokens.data() + i * page_size_);
    if (page == kNoPage) break;
    path.push_back(page);
    parent = page;
  }
}

int PrefixCache::Reach(std::span<const PageKey> keys) const noexcept {
  auto known = [&](const PageKey& key) {
    for (std::size_t at = Home(key); index_[at].page != kNoPage; at = (at + 1) & mask_)
      if (index_[at].tag == Tag(key) && At(index_[at].page).key == key) return true;
    return false;
  };
  return static_cast<int>(std::ranges::partition_point(keys, known) - keys.begin());
}

void PrefixCache::Resumable(std::vector<PageId>& path) const noexcept {
  for (std::size_t before = path.size() + 1; path.size() < before;) {
    before = path.size();
    path.resize(window_.Servable(path).size());
    while (snapshots_.total() > 0 && !path.empty() && snapshots_.Of(path.back()) < 0) path.pop_back();
  }
}

int PrefixCache::IdlePages(std::span<const PageId> path) const noexcept {
  int idle = 0;
  for (auto node = path.rbegin(); node != path.rend() && At(*node).active == 0; ++node) ++idle;
  return idle;
}

void PrefixCache::Activate(PageId node) noexcept {
  while (node != kNoPage && At(node).active++ == 0) {
    --evictable_;
    if (At(node).children == 0) leaves_.Remove(node);
    node = At(node).parent;
  }
}

void PrefixCache::Deactivate(PageId node) noexcept {
  while (node != kNoPage && --At(node).active == 0) {
    ++evictable_;
    At(node).epoch = epoch_;
    if (At(node).children == 0) leaves_.Push(node, epoch_, At(node).depth);
    node = At(node).parent;
  }
}

void PrefixCache::PathTo(PageId node, std::span<PageId> path) const noexcept {
  for (auto at = path.rbegin(); at != path.rend(); ++at, node = At(node).parent) *at = node;
}

NodeRef PrefixCache::Pin(PageId node) noexcept {
  NodeRef ref(*this);
  Activate(node);
  ref.node_ = node;
  return ref;
}

void PrefixCache::Descend(NodeRef& ref, PageId child) noexcept {
  Activate(child);  // first: between the two calls the parent must not fall out of use
  Deactivate(std::exchange(ref.node_, child));
}

void PrefixCache::Insert(NodeRef& ref, const PageKey& key, const Token* tokens, OwnedPage page) noexcept {
  const PageId id = page.Release();
  const PageId parent = ref.node_;
  // The pin moves from the parent to the child, so the parent's count of active uses stays what it was.
  At(id) = {.key = key, .epoch = epoch_, .parent = parent, .depth = Depth(parent) + 1, .active = 1};
  if (parent != kNoPage) ++At(parent).children;
  std::copy_n(tokens, page_size_, tokens_.begin() + static_cast<std::ptrdiff_t>(page_size_) * id);
  std::size_t at = Home(key);
  while (index_[at].page != kNoPage) at = (at + 1) & mask_;
  index_[at] = {Tag(key), id};
  ref.node_ = id;
  ++cached_;
  Tell(KvEvent::Kind::kStored, id);
}

void PrefixCache::Tell(KvEvent::Kind kind, PageId page) noexcept {
  if (log_ == nullptr) return;
  KvEvent event = name_;
  event.kind = kind;
  if (page != kNoPage) {
    event.key = At(page).key;
    if (kind == KvEvent::Kind::kStored && At(page).parent != kNoPage) event.parent = At(At(page).parent).key;
  }
  log_->Add(event);
}

void PrefixCache::IndexErase(PageId page) noexcept {
  std::size_t hole = Home(At(page).key);
  while (index_[hole].page != page) hole = (hole + 1) & mask_;
  // Close the gap (Knuth, TAOCP 6.4, algorithm R) instead of leaving tombstones, so that probes stay short for ever.
  for (std::size_t at = (hole + 1) & mask_; index_[at].page != kNoPage; at = (at + 1) & mask_) {
    const std::size_t home = Home(At(index_[at].page).key);
    if (((at - home) & mask_) >= ((at - hole) & mask_)) {
      index_[hole] = index_[at];
      hole = at;
    }
  }
  index_[hole] = {};
}

bool PrefixCache::EvictOne() noexcept {
  if (leaves_.empty()) return false;
  const PageId page = leaves_.top();
  if (!At(page).forgotten) Tell(KvEvent::Kind::kRemoved, page);
  Evict(page);
  return true;
}

void PrefixCache::Evict(PageId page) noexcept {
  leaves_.Remove(page);
  if (!At(page).forgotten) IndexErase(page);
  const PageId parent = At(page).parent;
  At(page) = {};
  snapshots_.Drop(page);
  window_.Drop(page);
  if (parent != kNoPage && --At(parent).children == 0 && At(parent).active == 0)
    leaves_.Push(parent, At(parent).epoch, At(parent).depth);
  --cached_;
  --evictable_;
  ++evicted_total_;
  pool_.Return(page);
}

void PrefixCache::Forget(PageId node) noexcept {
  if (At(node).forgotten) return;
  Tell(KvEvent::Kind::kRemoved, node);
  IndexErase(node);
  At(node).forgotten = true;
}

int PrefixCache::Flush() noexcept {
  const int pages = evictable_;
  const bool all = pages == cached_;
  if (all && pages > 0) Tell(KvEvent::Kind::kCleared, kNoPage);
  window_.Flush();
  while (!leaves_.empty()) all ? Evict(leaves_.top()) : static_cast<void>(EvictOne());
  return pages;
}

void PrefixCache::Check(std::span<const int> pins) const {
  auto require = [](bool holds, const char* rule, PageId page) {
    if (!holds) throw std::logic_error("prefix cache, page " + std::to_string(page) + ": " + rule);
  };
  std::vector<int> children(nodes_.size()), active(pins.begin(), pins.end());
  int cached = 0, evictable = 0;
  std::size_t leaves = 0;
  for (PageId page = 0; page < pool_.total(); ++page) {
    const Node& node = At(page);
    require(node.depth > 0 || pins[static_cast<std::size_t>(page)] == 0, "a page outside the tree is pinned", page);
    if (node.depth == 0) continue;
    ++cached;
    if (node.active == 0) ++evictable;
    require(!pool_.IsFree(page), "is cached and free", page);
    const int parent_depth = node.parent == kNoPage ? 0 : At(node.parent).depth;
    require(node.parent == kNoPage || parent_depth > 0, "its parent is not in the tree", page);
    require(node.depth == parent_depth + 1, "depth differs from its parent's depth + 1", page);
    const PageId found = FindChild(node.parent, node.key, TokensOf(page).data());
    require(node.forgotten ? found != page : found == page, "is not found by its key, or found though forgotten", page);
    if (node.parent == kNoPage) continue;
    ++children[static_cast<std::size_t>(node.parent)];
    if (node.active > 0) ++active[static_cast<std::size_t>(node.parent)];
  }
  for (PageId page = 0; page < pool_.total(); ++page) {
    const Node& node = At(page);
    if (node.depth == 0) continue;
    require(node.children == children[static_cast<std::size_t>(page)], "wrong count of children", page);
    require(node.active == active[static_cast<std::size_t>(page)], "uses differ from pins plus active children", page);
    const bool leaf = node.children == 0 && node.active == 0;
    require(leaves_.Contains(page) == leaf, "membership among the evictable leaves is wrong", page);
    leaves += leaf;
  }
  for (int index = 0; index < snapshots_.total(); ++index) {
    const PageId page = snapshots_.PageOf(index);
    if (page == kNoPage) continue;
    require(At(page).depth > 0, "is outside the tree and has a snapshot", page);
    require(snapshots_.Of(page) == index, "has another snapshot than the one that names it", page);
  }
  int idle = 0;
  for (PageId page = 0; page < window_.total(); ++page) {
    const PageId node = window_.NodeOf(page);
    require(window_.IsIdle(page) == (node != kNoPage && window_.PinsOf(page) == 0),
            "its window page is pinned and idle, or neither", node);
    idle += window_.IsIdle(page);
    if (node == kNoPage) continue;
    require(At(node).depth > 0, "is outside the tree and has a window page", node);
    require(window_.Of(node) == page, "has another window page than the one that names it", node);
    require(window_.PinsOf(page) == 0 || At(node).active > 0, "nobody uses it, but its window page", node);
  }
  require(idle == window_.idle(), "the heap of idle window pages holds others", kNoPage);
  require(cached == cached_, "count of cached pages is wrong", kNoPage);
  require(evictable == evictable_, "count of evictable pages is wrong", kNoPage);
  require(leaves == leaves_.size(), "the eviction heap holds pages outside the tree", kNoPage);
}

}  // namespace tokenspeed
