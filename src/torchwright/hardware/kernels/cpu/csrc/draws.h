// A draft's proposals from its logits: the likeliest token, or the one that a sequence's race draws among the likeliest.
//
// The same as `Sampler.guess` and generation/race.py, whose rounding the last digits of a confidence may miss.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace tw {

// How one sequence chooses its next token, as `Sampling` has it, and the key of its race.
struct Choice {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  uint64_t key;
};

// The place of a token among the logits, and the confidence in it.
struct Guess {
  int64_t place;
  double confidence;
};

// The time of a number in the race of a key (SplitMix64; Steele, Lea and Flood, 2014).
inline double race_time(uint64_t number, uint64_t key) {
  uint64_t bits = (number + 1) * 0x9E3779B97F4A7C15 + key;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  bits ^= bits >> 31;
  return -std::log((double(bits >> 11) + 0.5) * 0x1p-53);
}

// Guesses from rows of logits and the largest of each of their panels.
class Guesser {
 public:
  // `ids` are the tokens of the `features` logits; draws are among the `drawn_from` likeliest.
  Guesser(const int64_t* ids, int64_t features, int64_t drawn_from)
      : ids(ids), features(features), panels((features + PANEL - 1) / PANEL), count(std::min(features, drawn_from)) {}

  Guess operator()(const float* logits, const float* peaks, const Choice& choice) {
    float peak = -std::numeric_limits<float>::infinity();
    for (int64_t panel = 0; panel < panels; panel++) {
      if (std::isnan(peaks[panel])) return {0, 0};
      peak = std::max(peak, peaks[panel]);
    }
    if (!std::isfinite(peak)) return {0, 0};
    return choice.temperature == 0 ? first(logits, peaks, peak) : drawn(logits, peaks, peak, choice);
  }

 private:
  // The first largest, with its probability. Terms below e^-30 change no digit of a float's sum.
  Guess first(const float* logits, const float* peaks, float peak) const {
    constexpr float FAR = 30;
    int64_t place = -1;
    double sum = 0;
    for (int64_t panel = 0; panel < panels; panel++) {
      if (peaks[panel] < peak - FAR) continue;
      for (int64_t i = panel * PANEL, end = std::min(i + PANEL, features); i < end; i++) {
        if (logits[i] < peak - FAR) continue;
        sum += std::exp(logits[i] - peak);
        if (place < 0 && logits[i] == peak) place = i;
      }
    }
    return {place, 1 / sum};
  }

  // The winner of the race among the likeliest that the choice keeps. They fall, so that what is kept comes first.
  Guess drawn(const float* logits, const float* peaks, float peak, const Choice& choice) {
    find(logits, peaks);
    int64_t kept = int64_t(best.size());
    if (choice.top_k > 0 && choice.top_k < kept) {
      const float last = best[choice.top_k - 1].first;
      for (kept = choice.top_k; kept < int64_t(best.size()) && best[kept].first == last;) kept++;
    }
    const float temperature = float(std::max(choice.temperature, 1e-30));
    double all = 0;
    for (int64_t i = 0; i < kept; i++) {
      best[i].first = std::exp((best[i].first - peak) / temperature);
      all += best[i].first;
    }
    double before = 0, weights = 0, speeds = 0, fastest = 0;
    int64_t winner = 0;
    for (int64_t i = 0; i < kept; i++) {
      const float weight = best[i].first;
      if (i && (before >= choice.top_p * all || weight < float(choice.min_p) * best[0].first)) break;
      before += weight, weights += weight;
      const double speed = weight / race_time(ids[-best[i].second], choice.key);
      speeds += speed;
      if (speed > fastest) fastest = speed, winner = i;
    }
    return {-best[winner].second, std::sqrt(fastest / speeds * (best[winner].first / weights))};
  }

  // The likeliest, falling, and of equal ones the first first: (logit, -place).
  void find(const float* logits, const float* peaks) {
    best.clear();
    const auto later = std::greater<std::pair<float, int64_t>>();
    for (int64_t panel = 0; panel < panels; panel++) {
      const bool full = int64_t(best.size()) == count;
      if (full && peaks[panel] <= best.front().first) continue;
      for (int64_t i = panel * PANEL, end = std::min(i + PANEL, features); i < end; i++) {
        const std::pair<float, int64_t> one{logits[i], -i};
        if (int64_t(best.size()) == count) {
          if (!later(one, best.front())) continue;
          std::pop_heap(best.begin(), best.end(), later);
          best.back() = one;
        } else {
          best.push_back(one);
        }
        std::push_heap(best.begin(), best.end(), later);
      }
    }
    std::sort_heap(best.begin(), best.end(), later);
  }

  const int64_t* const ids;
  const int64_t features, panels, count;
  std::vector<std::pair<float, int64_t>> best;
};

}  // namespace tw
