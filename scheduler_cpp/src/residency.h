// The KV pages of one running request, in token order: the first `committed()` are nodes of the prefix tree and stay
// through one pin, the rest are owned here and go back to the pool with this object. Nothing allocates after
// construction, so that growth and commits cannot fail half way.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "digest.h"
#include "page_pool.h"
#include "prefix_cache.h"
#include "token_sequence.h"

namespace tokenspeed {

// Names for the contents of page tables: never 0, never given twice by one scheduler.
class ContentIds {
 public:
  std::uint64_t Next() noexcept { return ++last_; }

 private:
  std::uint64_t last_ = 0;
};

class Residency {
 public:
  // Pins `path` (a match in `cache`); `capacity`: the most pages the request can ever hold.
  Residency(PagePool& pool, PrefixCache& cache, ContentIds& ids, std::span<const PageId> path, int capacity)
      : pool_(&pool),
        cache_(&cache),
        ids_(&ids),
        ref_(cache),
        committed_(static_cast<int>(path.size())),
        content_(ids.Next()) {
    pages_.reserve(static_cast<std::size_t>(capacity));
    pages_.assign(path.begin(), path.end());
    for (std::size_t i = 0; i < path.size(); ++i) digest_ += CellDigest(i, path[i]);
    if (!path.empty()) ref_ = cache.Pin(path.back());
  }
  Residency(Residency&& other) noexcept = default;
  Residency& operator=(Residency&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(cache_, other.cache_);
    std::swap(ids_, other.ids_);
    std::swap(ref_, other.ref_);
    std::swap(pages_, other.pages_);
    std::swap(committed_, other.committed_);
    std::swap(content_, other.content_);
    std::swap(digest_, other.digest_);
    return *this;
  }
  ~Residency() {
    // The deepest page first, so that the pool hands them out again in token order.
    for (auto page = pages_.size(); page > static_cast<std::size_t>(committed_); --page)
      pool_->Return(pages_[page - 1]);
  }

  // Gives back all pages but the committed ones.
  void DropTail() noexcept {
    for (; pages_.size() > static_cast<std::size_t>(committed_); pages_.pop_back()) {
      digest_ -= CellDigest(pages_.size() - 1, pages_.back());
      pool_->Return(pages_.back());
    }
  }

  int pages() const noexcept { return static_cast<int>(pages_.size()); }
  int committed() const noexcept { return committed_; }
  PageId node() const noexcept { return ref_.node(); }
  std::span<const PageId> table() const noexcept { return pages_; }
  // Changes whenever an entry of `table()` changes; appending does not change it.
  std::uint64_t content() const noexcept { return content_; }
  // The digest of `table()`, kept as it changes (see digest.h).
  std::uint64_t digest() const noexcept { return digest_; }

  void Append(OwnedPage page) noexcept {
    digest_ += CellDigest(pages_.size(), page.id());
    pages_.push_back(page.Release());
  }

  // Puts a snapshot beside the page that ends the first `pages` of the table, which the tree has; whether it took it.
  bool Keep(int pages, Snapshot snapshot) noexcept {
    return cache_->snapshots().Keep(pages_[static_cast<std::size_t>(pages - 1)], std::move(snapshot));
  }
  // Takes back the snapshot beside the page that ends the first `pages` of the table.
  void Forget(int pages) noexcept { cache_->snapshots().Drop(pages_[static_cast<std::size_t>(pages - 1)]); }

  // The pin on the committed pages, for one that goes on using them; the table is of no use afterwards.
  NodeRef TakePin() noexcept { return std::move(ref_); }

  // Gives the first `computed_pages` pages (full, and computed by steps that returned) to the prefix tree. Where the
  // tree already has the page (another request computed the same one), the table points to the tree's and this copy
  // goes back to the pool, once step `reader` has returned (PagePool::Hold).
  void Commit(const TokenSequence& tokens, int computed_pages, StepId reader) noexcept {
    for (; committed_ < computed_pages; ++committed_) {
      const auto at = static_cast<std::size_t>(committed_);
      const PageKey& key = tokens.keys()[at];
      const Token* page_tokens = tokens.page(committed_);
      OwnedPage own(*pool_, pages_[at]);
      const PageId twin = cache_->FindChild(ref_.node(), key, page_tokens);
      if (twin == kNoPage) {
        cache_->Insert(ref_, key, page_tokens, std::move(own));
        continue;
      }
      cache_->Descend(ref_, twin);
      digest_ += CellDigest(at, twin) - CellDigest(at, pages_[at]);
      pages_[at] = twin;
      content_ = ids_->Next();
      pool_->Hold(std::move(own), reader);
    }
  }

 private:
  PagePool* pool_;
  PrefixCache* cache_;
  ContentIds* ids_;
  NodeRef ref_;
  std::vector<PageId> pages_;
  int committed_;
  std::uint64_t content_;
  std::uint64_t digest_ = 0;
};

}  // namespace tokenspeed
