// The KV pages of one running request, in token order: the first `committed()` are nodes of the prefix tree and stay
// through one pin, the rest are owned here and go back to the pool with this object. Nothing allocates after
// construction, so that growth and commits cannot fail half way.
//
// Of a model with windowed layers there is a second table, of window pages: columns from `first_seen` on hold a page,
// pinned beside the tree's page where that is committed, else owned. Columns before it name some page that the request
// wrote or read, or did once: a kernel may read such a page beside those it needs, but nothing depends on what it
// holds.
#pragma once

#include <algorithm>
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
  // Where a request takes up a prefix: `path` in the cache, of which the window group's part begins at `first_seen`;
  // `known`: pages that the tree has of the request, which may be more than can be taken up.
  struct Start {
    std::span<const PageId> path = {};
    int first_seen = 0;
    int known = 0;
  };

  // Pins what it starts from; `capacity`: the most pages the request can ever hold.
  Residency(PagePool& pool, PrefixCache& cache, ContentIds& ids, const Start& start, int capacity)
      : pool_(&pool),
        cache_(&cache),
        ids_(&ids),
        ref_(cache),
        committed_(static_cast<int>(start.path.size())),
        content_(ids.Next()),
        first_seen_(start.first_seen),
        known_(start.known) {
    const auto& path = start.path;
    pages_.reserve(static_cast<std::size_t>(capacity));
    if (windowed()) window_pages_.reserve(static_cast<std::size_t>(capacity));
    pages_.assign(path.begin(), path.end());
    for (std::size_t i = 0; i < path.size(); ++i) digest_ += CellDigest(i, path[i]);
    if (!path.empty()) ref_ = cache.Pin(path.back());
    if (!windowed()) return;
    unnamed_ = static_cast<std::size_t>(first_seen_);
    window_pages_.resize(unnamed_);
    for (auto i = static_cast<std::size_t>(first_seen_); i < path.size(); ++i) {
      const PageId page = cache.window().Of(path[i]);
      cache.window().Pin(page);
      PushWindowPage(page);
    }
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
    std::swap(window_pages_, other.window_pages_);
    std::swap(window_digest_, other.window_digest_);
    std::swap(unnamed_, other.unnamed_);
    std::swap(first_seen_, other.first_seen_);
    std::swap(known_, other.known_);
    return *this;
  }
  ~Residency() {
    // The deepest page first, so that the pool hands them out again in token order.
    for (auto page = pages_.size(); page > static_cast<std::size_t>(committed_); --page)
      pool_->Return(pages_[page - 1]);
    while (static_cast<int>(window_pages_.size()) > first_seen_) PopWindowPage();
  }

  // Gives back all pages but the committed ones.
  void DropTail() noexcept {
    for (; pages_.size() > static_cast<std::size_t>(committed_); pages_.pop_back()) {
      digest_ -= CellDigest(pages_.size() - 1, pages_.back());
      pool_->Return(pages_.back());
    }
    while (static_cast<int>(window_pages_.size()) > std::max(first_seen_, committed_)) PopWindowPage();
  }

  bool windowed() const noexcept { return cache_->window().window().any(); }
  int pages() const noexcept { return static_cast<int>(pages_.size()); }
  int committed() const noexcept { return committed_; }
  PageId node() const noexcept { return ref_.node(); }
  std::span<const PageId> table() const noexcept { return pages_; }
  std::span<const PageId> window_table() const noexcept { return window_pages_; }
  int window_pages() const noexcept { return static_cast<int>(window_pages_.size()); }
  int first_seen() const noexcept { return first_seen_; }
  int known() const noexcept { return known_; }
  // Changes whenever an entry of a table changes; appending does not change it.
  std::uint64_t content() const noexcept { return content_; }
  // The digests of the tables, kept as they change (see digest.h).
  std::uint64_t digest() const noexcept { return digest_; }
  std::uint64_t window_digest() const noexcept { return window_digest_; }

  void Append(OwnedPage page) noexcept {
    digest_ += CellDigest(pages_.size(), page.id());
    pages_.push_back(page.Release());
  }
  void AppendWindowPage(OwnedPage page) noexcept { PushWindowPage(page.Release()); }

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
      } else {
        cache_->Descend(ref_, twin);
        digest_ += CellDigest(at, twin) - CellDigest(at, pages_[at]);
        pages_[at] = twin;
        content_ = ids_->Next();
        pool_->Hold(std::move(own), reader);
      }
      if (windowed() && committed_ >= first_seen_) CommitWindowPage(at, reader);
    }
  }

  // All that is still to be computed lies behind `pages` full ones: what is not seen from there goes back, and is
  // evicted first, but for the ends of what was asked for, of which the prompt's `prompt` tokens are one.
  void PassBy(int pages, int prompt) noexcept {
    const Window& window = cache_->window().window();
    const int first = std::min(window.FirstBehind(pages), window_pages());
    for (; first_seen_ < first; ++first_seen_) {
      const PageId page = window_pages_[static_cast<std::size_t>(first_seen_)];
      if (first_seen_ >= committed_) {
        WindowPool().Return(page);
        continue;
      }
      for (const int end : {known_, prompt / window.page_size})  // one page less of a prompt is asked for again
        if (window.FirstBehind(end - 1) <= first_seen_ && first_seen_ < end) cache_->window().KeepLonger(page);
      cache_->window().Unpin(page);
    }
  }

 private:
  PagePool& WindowPool() noexcept { return cache_->window().pool(); }

  void PushWindowPage(PageId page) noexcept {
    for (; unnamed_ > 0; --unnamed_) {  // the first one stands for those that nobody sees
      window_pages_[unnamed_ - 1] = page;
      window_digest_ += CellDigest(unnamed_ - 1, page);
    }
    window_digest_ += CellDigest(window_pages_.size(), page);
    window_pages_.push_back(page);
  }

  void PopWindowPage() noexcept {
    const PageId page = window_pages_.back();
    window_pages_.pop_back();
    window_digest_ -= CellDigest(window_pages_.size(), page);
    if (window_pages() >= committed_) return WindowPool().Return(page);
    cache_->window().KeepLonger(page);  // what it saw last is the end of what was asked for
    cache_->window().Unpin(page);
  }

  // As `Commit`: the window page goes beside the tree's page, or makes way for the one that is there.
  void CommitWindowPage(std::size_t at, StepId reader) noexcept {
    WindowPages& window = cache_->window();
    OwnedPage own(WindowPool(), window_pages_[at]);
    const PageId twin = window.Of(pages_[at]);
    if (twin == kNoPage) return window.Attach(pages_[at], committed_ + 1, std::move(own));
    window.Pin(twin);
    window_digest_ += CellDigest(at, twin) - CellDigest(at, own.id());
    window_pages_[at] = twin;
    content_ = ids_->Next();
    WindowPool().Hold(std::move(own), reader);
  }

  PagePool* pool_;
  PrefixCache* cache_;
  ContentIds* ids_;
  NodeRef ref_;
  std::vector<PageId> pages_;
  int committed_;
  std::uint64_t content_;
  std::uint64_t digest_ = 0;
  std::vector<PageId> window_pages_;
  std::uint64_t window_digest_ = 0;
  std::size_t unnamed_ = 0;  // leading columns that name no page yet
  int first_seen_;
  int known_;
};

}  // namespace tokenspeed
