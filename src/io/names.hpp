// The words that people type and read for the library's choices, in one table each: parsing and printing use the same.
#pragma once

#include <array>
#include <string_view>

#include "dosa/options.hpp"
#include "dosa/result.hpp"
#include "score/reference.hpp"

namespace dosa {

template <typename Value>
struct Named {
  std::string_view name;
  Value value;
};

inline constexpr std::array kMethods = {Named{"auto", Method::automatic}, Named{"dense", Method::dense},
                                        Named{"fused", Method::fused}, Named{"dosa", Method::dosa}};
inline constexpr std::array kScreeningMethods = {Named{"auto", Method::automatic}, Named{"dosa", Method::dosa}};
inline constexpr std::array kBackends = {Named{"cpu", Backend::cpu}, Named{"cuda", Backend::cuda}};
inline constexpr std::array kForms = {Named{"auto", Form::automatic}, Named{"base", Form::base},
                                      Named{"absolute", Form::absolute}, Named{"extended", Form::extended}};
inline constexpr std::array kSeedPolicies = {
    Named{"auto", SeedPolicy::automatic}, Named{"nearest-spread", SeedPolicy::nearest_spread},
    Named{"chain", SeedPolicy::chain}, Named{"largest-bounds", SeedPolicy::largest_bounds},
    Named{"sample", SeedPolicy::sample}};
inline constexpr std::array kAblations = {
    Named{"none", Ablation::none}, Named{"no-aggregate", Ablation::no_aggregate},
    Named{"all-aggregated", Ablation::all_aggregated}, Named{"no-projection", Ablation::no_projection}};
inline constexpr std::array kPrecisions = {Named{"auto", ScreenPrecision::automatic},
                                           Named{"f32", ScreenPrecision::f32}, Named{"i8", ScreenPrecision::i8}};
inline constexpr std::array kPaths = {Named{"empty", Path::empty},
                                      Named{"short_row", Path::short_row},
                                      Named{"dosa", Path::dosa},
                                      Named{"full", Path::full},
                                      Named{"full_context", Path::full_context},
                                      Named{"full_loose", Path::full_loose},
                                      Named{"full_exempt", Path::full_exempt}};
inline constexpr std::array kOrders = {Named{"score", Order::score}, Named{"ascending", Order::ascending}};
inline constexpr std::array kIndexSpaces = {Named{"absolute", IndexSpace::absolute},
                                            Named{"relative", IndexSpace::relative},
                                            Named{"slot", IndexSpace::slot}};
inline constexpr std::array kReferences = {Named{"cpu", ReferenceScorer::cpu}, Named{"sm90", ReferenceScorer::sm90}};

template <typename Value, std::size_t N>
constexpr std::string_view name_in(const std::array<Named<Value>, N>& table, Value value) {
  for (const auto& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

}  // namespace dosa
