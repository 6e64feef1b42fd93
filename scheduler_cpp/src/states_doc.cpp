// Renders docs/scheduler-states.md from the compiled table, so the page cannot disagree with the code.
#include <sstream>
#include <string>

#include "fsm.h"

namespace tokenspeed {
namespace {

std::string Describe(const TableCell& cell) {
  if (cell.ignored) return "·";
  std::string text = cell.stays ? "stays" : "";
  for (std::string_view to : cell.to) {
    if (!text.empty()) text += " / ";
    text += to;
  }
  return text;
}

}  // namespace

std::string StatesMarkdown() {
  const std::vector<TableCell> table = TransitionTable();
  std::ostringstream out;
  out << "# States of a request\n\n"
         "Generated from the event x state table in `scheduler_cpp/src/transitions.h`; `make docs` writes it anew and "
         "a\n"
         "test compares it with the code.\n\n"
         "## What each state owns\n\n| state | owns |\n|---|---|\n";
  ForEachState([&]<class S>(std::type_identity<S>) { out << "| " << S::kName << " | " << S::kOwns << " |\n"; });
  out << "\n## Events\n\n| event | when |\n|---|---|\n";
  ForEachEvent([&]<class E>(std::type_identity<E>) { out << "| " << E::kName << " | " << E::kWhen << " |\n"; });

  out << "\n## Table\n\nA dot is an ignored pair: the event is late, a duplicate, or has no meaning there.\n\n| state "
         "|";
  ForEachEvent([&]<class E>(std::type_identity<E>) { out << ' ' << E::kName << " |"; });
  out << "\n|---|";
  ForEachEvent([&]<class E>(std::type_identity<E>) { out << "---|"; });
  out << '\n';
  ForEachState([&]<class S>(std::type_identity<S>) {
    out << "| " << S::kName << " |";
    for (const TableCell& cell : table)
      if (cell.from == S::kName) out << ' ' << Describe(cell) << " |";
    out << '\n';
  });

  out << "\n## Diagram\n\n```mermaid\nstateDiagram-v2\n    [*] --> Submitted\n    [*] --> Bootstrapping\n";
  for (const TableCell& cell : table)
    for (std::string_view to : cell.to) out << "    " << cell.from << " --> " << to << " : " << cell.event << '\n';
  out << "    Finished --> [*]\n```\n";
  return out.str();
}

}  // namespace tokenspeed
