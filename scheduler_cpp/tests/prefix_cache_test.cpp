// The prefix tree against a plain map, with keys that collide on purpose; its pins; its order of eviction.
#include "prefix_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <set>

namespace tokenspeed {
namespace {

constexpr int kPageSize = 2;

PageKey Weak(std::uint64_t bits) { return {bits & 15, bits & 15}; }  // four bits: nearly every lookup collides

// Adds a child that holds `token` twice under the pinned node, or moves to the one that exists.
void Extend(PagePool& pool, PrefixCache& cache, NodeRef& ref, Token token, PageKey key) {
  const Token tokens[kPageSize] = {token, token};
  if (const PageId child = cache.FindChild(ref.node(), key, tokens); child != kNoPage) return cache.Descend(ref, child);
  cache.Insert(ref, key, tokens, pool.Take());
}

TEST(PrefixCache, CollidingKeysNeverShareAPage) {
  PagePool pool(8);
  PrefixCache cache(pool, kPageSize);
  NodeRef a(cache), b(cache), c(cache);
  const PageKey key = Weak(3);
  Extend(pool, cache, a, 1, key);
  Extend(pool, cache, b, 2, key);  // the same key, other tokens
  EXPECT_NE(a.node(), b.node());
  Extend(pool, cache, a, 9, key);  // the same key and tokens below other parents
  Extend(pool, cache, b, 9, key);
  EXPECT_NE(a.node(), b.node());
  Extend(pool, cache, c, 1, key);
  Extend(pool, cache, c, 9, key);
  EXPECT_EQ(c.node(), a.node());
  std::vector<PageId> path;
  const PageKey keys[] = {key, key};
  const Token tokens[] = {2, 2, 9, 9};
  cache.Match(keys, tokens, path);
  EXPECT_EQ(path.back(), b.node());
  EXPECT_EQ(cache.cached(), 4);
}

TEST(PrefixCache, APinKeepsTheWholePath) {
  PagePool pool(4);
  PrefixCache cache(pool, kPageSize);
  {
    NodeRef ref(cache);
    for (Token token : {1, 2, 3}) Extend(pool, cache, ref, token, Weak(static_cast<std::uint64_t>(token)));
    EXPECT_EQ(cache.evictable(), 0);
    EXPECT_FALSE(cache.EvictOne());
    NodeRef second = cache.Pin(ref.node());
    NodeRef moved = std::move(ref);
    EXPECT_FALSE(cache.EvictOne());
  }
  EXPECT_EQ(cache.evictable(), 3);
  EXPECT_EQ(cache.Flush(), 3);
  EXPECT_EQ(pool.free(), 4);
}

TEST(PrefixCache, EvictsTheSuffixFirstAndTheOldestPathFirst) {
  PagePool pool(8);
  PrefixCache cache(pool, kPageSize);
  auto path = [&](Token first) {
    std::vector<PageId> pages;
    NodeRef ref(cache);
    for (Token token = first; token < first + 3; ++token) {
      Extend(pool, cache, ref, token, Weak(static_cast<std::uint64_t>(token)));
      pages.push_back(ref.node());
    }
    cache.Tick();
    return pages;
  };
  const auto old_path = path(10), new_path = path(20);
  path(10);  // used again: younger than the other now
  for (const auto* pages : {&new_path, &old_path})
    for (auto page = pages->rbegin(); page != pages->rend(); ++page) {
      EXPECT_TRUE(cache.IsCached(*page));
      EXPECT_TRUE(cache.EvictOne());
      EXPECT_FALSE(cache.IsCached(*page));
    }
  EXPECT_EQ(pool.free(), 8);
}

TEST(PrefixCache, IdlePagesAreWhatAPinTakes) {
  PagePool pool(8);
  PrefixCache cache(pool, kPageSize);
  std::vector<PageId> pages;
  auto grown = std::make_unique<NodeRef>(cache);
  for (Token token : {1, 2, 3, 4}) {
    Extend(pool, cache, *grown, token, Weak(1));
    pages.push_back(grown->node());
  }
  NodeRef middle = cache.Pin(pages[1]);
  grown.reset();
  EXPECT_EQ(cache.IdlePages(pages), 2);
  EXPECT_EQ(cache.IdlePages(std::span(pages).first(2)), 0);
  const int before = cache.evictable();
  NodeRef all = cache.Pin(pages[3]);
  EXPECT_EQ(before - cache.evictable(), 2);
}

// Random growth, pins, drops and evictions with four-bit keys; the model is a map from token paths to pages.
TEST(PrefixCache, AgreesWithAMap) {
  constexpr int kPages = 24;
  std::mt19937 random(1);
  PagePool pool(kPages);
  PrefixCache cache(pool, kPageSize);
  using Path = std::vector<Token>;
  std::map<Path, PageId> model;
  struct Holder {
    NodeRef ref;
    Path path;
  };
  std::vector<Holder> holders;
  auto key_of = [](const Path& path) {
    std::uint64_t sum = 7;
    for (Token token : path) sum = sum * 31 + static_cast<std::uint64_t>(token);
    return Weak(sum);
  };
  for (int step = 0; step < 20'000; ++step) {
    const auto pick = random() % 10;
    if (pick < 2) {
      holders.push_back({NodeRef(cache), {}});
    } else if (pick < 8 && !holders.empty()) {
      Holder& holder = holders[random() % holders.size()];
      Path next = holder.path;
      next.push_back(static_cast<Token>(random() % 3));
      const bool known = model.contains(next);
      if (!known && pool.free() == 0) {
        if (cache.EvictOne()) {
          std::erase_if(model, [&](const auto& entry) { return !cache.IsCached(entry.second); });
        }
        continue;
      }
      Extend(pool, cache, holder.ref, next.back(), key_of(next));
      if (known) {
        EXPECT_EQ(model.at(next), holder.ref.node());
      } else {
        EXPECT_TRUE(model.emplace(next, holder.ref.node()).second);
      }
      holder.path = std::move(next);
    } else if (!holders.empty()) {
      std::swap(holders[random() % holders.size()], holders.back());
      holders.pop_back();
    }
    cache.Tick();
    EXPECT_EQ(cache.cached(), static_cast<int>(model.size()));
    std::vector<int> pins(kPages);
    std::set<Path> used;
    for (const Holder& holder : holders) {
      if (holder.ref.node() != kNoPage) ++pins[static_cast<std::size_t>(holder.ref.node())];
      for (Path path = holder.path; !path.empty(); path.pop_back()) used.insert(path);
    }
    EXPECT_EQ(cache.evictable(), static_cast<int>(model.size() - used.size()));
    if (step % 16 == 0) {
      ASSERT_NO_THROW(cache.Check(pins));
      for (const auto& [path, page] : model) {  // every path is found, token by token
        std::vector<PageKey> keys;
        std::vector<Token> tokens;
        Path prefix;
        for (Token token : path) {
          prefix.push_back(token);
          keys.push_back(key_of(prefix));
          tokens.insert(tokens.end(), kPageSize, token);
        }
        std::vector<PageId> found;
        cache.Match(keys, tokens, found);
        ASSERT_EQ(found.size(), path.size());
        ASSERT_EQ(found.back(), page);
      }
    }
  }
}

TEST(LruHeap, AgreesWithASortedSet) {
  constexpr int kPages = 64;
  std::mt19937 random(2);
  LruHeap heap(kPages);
  std::set<std::tuple<std::uint64_t, int, PageId>> model;
  std::map<PageId, std::tuple<std::uint64_t, int, PageId>> entries;
  for (int step = 0; step < 20'000; ++step) {
    const auto page = static_cast<PageId>(random() % kPages);
    ASSERT_EQ(heap.Contains(page), entries.contains(page));
    if (const auto entry = entries.find(page); entry != entries.end()) {
      heap.Remove(page);
      model.erase(entry->second);
      entries.erase(entry);
    } else {
      const std::uint64_t epoch = random() % 8;
      const int depth = static_cast<int>(random() % 4);
      heap.Push(page, epoch, depth);
      entries[page] = {epoch, -depth, page};
      model.insert(entries[page]);
    }
    ASSERT_EQ(heap.size(), model.size());
    if (!model.empty()) {
      ASSERT_EQ(heap.top(), std::get<2>(*model.begin()));
    }
  }
}

}  // namespace
}  // namespace tokenspeed
