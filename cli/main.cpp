// The command line. What the verbs do is in one file each; this one only reads their arguments.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <utility>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "commands.hpp"
#include "console.hpp"
#include "dosa/indexer.hpp"
#include "io/names.hpp"

namespace dosa::cli {
namespace {

/// An option whose value is one word of a table.
template <typename Value, std::size_t N>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, Value& target, const std::array<Named<Value>, N>& table,
                        const std::string& help) {
  std::vector<std::string> words;
  for (const auto& entry : table) words.emplace_back(entry.name);
  return app
      .add_option_function<std::string>(
          flag,
          [&target, &table](const std::string& word) {
            target = std::ranges::find(table, std::string_view(word), &Named<Value>::name)->value;
          },
          help)
      ->option_text(CLI::detail::join(words, "|") + " [" + std::string(name_in(table, target)) + "]")
      ->check(CLI::IsMember(words));
}

/// A number from low to high; unlike CLI::Range it refuses NaN, and prints its limits as they were written.
template <typename Number>
CLI::Validator between(Number low, Number high) {
  const std::string allowed = fmt::format("{} to {}", low, high);
  const auto problem = [=](const std::string& text) {
    Number value{};
    if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return std::string();
    return fmt::format("{} is not allowed; allowed are {}", text, allowed);
  };
  return {problem, allowed};
}

CLI::Validator not_negative() {
  const auto problem = [](const std::string& text) {
    std::int64_t value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= 0) return std::string();
    return fmt::format("{} is not allowed; allowed are whole numbers from 0", text);
  };
  return {problem, ""};
}

/// Options that steer how a selection is computed; the same for every verb that computes one.
void add_run_options(CLI::App& app, Options& options, std::string& implementation) {
  const std::string how = "How it is computed (never changes the result)";
  add_choice(app, "--backend", options.backend, kBackends, "where to compute")->group(how);
  app.add_option("--threads", options.threads, "worker threads; 0: one per CPU this process may use")
      ->capture_default_str()
      ->group(how);
  app.add_option("--implementation", implementation, "CPU kernels by name, see `dosa info`; default: the fastest")
      ->group(how);
  add_choice(app, "--form", options.certificate.form, kForms, "form of the certificate")->group(how);
  app.add_option("--row-budget", options.certificate.row_budget, "bound rows of a certificate; 0: chosen from the data")
      ->capture_default_str()
      ->group(how);
  app.add_option("--aggregates", options.certificate.aggregates, "groups of omitted negative heads; 0: chosen")
      ->capture_default_str()
      ->group(how);
  add_choice(app, "--precision", options.certificate.precision, kPrecisions, "arithmetic of the screen")->group(how);
  add_choice(app, "--ablation", options.certificate.ablation, kAblations, "part of the certificate that is left out")
      ->group(how);
  add_choice(app, "--seeds", options.seeds, kSeedPolicies, "which keys are scored first")->group(how);
  app.add_option("--memory-budget", options.memory_budget, "largest workspace in bytes; also 512M, 2G")
      ->transform(CLI::AsSizeValue(false))
      ->option_text("SIZE [4G]")
      ->group(how);
  app.add_option("--min-context", options.min_context,
                 "method auto scores rows in full that see fewer keys; 0: derived")
      ->capture_default_str()
      ->group(how);
}

void add_arrangement(CLI::App& app, Options& options) {
  add_choice(app, "--order", options.order, kOrders, "best first, or by key id");
  add_choice(app, "--ids", options.index_space, kIndexSpaces,
             "key ids, counted from the first visible key, or places in the page pool");
}

void add_traces(CLI::App& app, std::vector<std::string>& traces) {
  app.add_option("trace", traces, "trace files (safetensors)")->required()->option_text("TRACE ...");
}

void add_topk_list(CLI::App& app, std::vector<std::int32_t>& topk) {
  // One argument, so that the traces after it are not taken for numbers.
  app.add_option("--topk", topk, "keys to keep per query; several separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->option_text("K[,K...] [2048]");
}

void add_json(CLI::App& app, bool& json) { app.add_flag("--json", json, "print one JSON line per case"); }

std::string examples(std::initializer_list<const char*> lines) {
  std::string text = "Examples:";
  for (const char* line : lines) text += std::string("\n  ") + line;
  return text;
}

/// The parsed command line; `command` is the verb that was asked for.
struct CommandLine {
  CLI::App app{
      "Exact Top-K key ids for DeepSeek Sparse Attention: certified early rejection skips most of the scoring and "
      "never\n"
      "changes the result.",
      "dosa"};
  std::string implementation, out;
  bool json = false;
  SelectArgs select_args;
  VerifyArgs verify_args;
  BenchArgs bench_args;
  ExplainArgs explain_args;
  RandomArgs random;
  AdversarialArgs adversarial;
  ScoresArgs scores;
  ExtendArgs extend;
  DecodeArgs decode;
  std::function<Result<int>()> command;

  CommandLine() {
    app.require_subcommand(1);
    app.set_version_flag("--version", std::string("dosa ") + version());
    app.footer(examples({"dosa select traces/demo-h32.safetensors          what was selected, and what it took",
                         "dosa verify traces/demo-h32.safetensors          proof against plain full scoring",
                         "dosa bench traces/demo-h32.safetensors           time against full scoring",
                         "dosa explain traces/demo-h32.safetensors         why it took that, query by query",
                         "dosa VERB --help                                 what a verb takes"}) +
               "\n\nExit codes: 0 ok, 1 a difference was found, 2 usage or bad input, 3 unsupported shape or device,\n"
               "70 a bug of dosa.");
    add_select();
    add_verify();
    add_bench();
    add_explain();
    add_synth();
    CLI::App* info_app = app.add_subcommand("info", "Version, backends and CPU implementations of this machine");
    info_app->add_flag("--json", json, "print one JSON line");
    info_app->footer(examples({"dosa info", "dosa info --json"}));
    info_app->callback([this] { command = [this] { return info(json); }; });
  }

  void add_select() {
    CLI::App* sub = app.add_subcommand("select", "Select the Top-K keys of every query of a trace");
    SelectArgs& args = select_args;
    sub->add_option("trace", args.trace, "trace file (safetensors)")->required()->option_text("TRACE");
    sub->add_option("--topk", args.topk, "keys to keep per query")->capture_default_str();
    add_choice(*sub, "--method", args.options.method, kMethods,
               "all exact; dense and fused score every key, dosa bounds first, auto takes what pays");
    add_arrangement(*sub, args.options);
    sub->add_option("--out", args.out, "write ids and scores to this safetensors file instead of printing a summary");
    sub->add_option("--verify-rows", args.options.verify_rows, "recompute this many rows in full and compare")
        ->capture_default_str();
    add_json(*sub, args.json);
    add_run_options(*sub, args.options, implementation);
    sub->footer(examples(
        {"dosa select t.safetensors --topk 256", "dosa select t.safetensors --out ids.safetensors --order ascending"}));
    sub->callback([this] {
      select_args.options.implementation = implementation;
      command = [this] { return select(select_args); };
    });
  }

  void add_verify() {
    CLI::App* sub = app.add_subcommand("verify", "Compare every method with the oracle, ids and score bits");
    VerifyArgs& args = verify_args;
    add_traces(*sub, args.traces);
    add_topk_list(*sub, args.topk);
    sub->add_option("--rows", args.rows, "rows compared with the oracle, evenly spread; 0: all")
        ->check(not_negative())
        ->capture_default_str();
    add_choice(*sub, "--reference", args.reference, kReferences,
               "whose scores: this library's on a CPU, or those of DeepGEMM's SM90 kernels (emulated)");
    add_arrangement(*sub, args.options);
    add_json(*sub, args.json);
    add_run_options(*sub, args.options, implementation);
    sub->footer(
        "The oracle scores every visible key with plain scalar code and sorts everything. Rows that --rows leaves\n"
        "out are compared between the methods.\n\n" +
        examples({"dosa verify a.safetensors b.safetensors --topk 2048,256",
                  "dosa verify a.safetensors --rows 8 --reference sm90"}));
    sub->callback([this] {
      verify_args.options.implementation = implementation;
      command = [this] { return verify(verify_args); };
    });
  }

  void add_bench() {
    CLI::App* sub = app.add_subcommand("bench", "Time the methods against each other, their results proved equal");
    BenchArgs& args = bench_args;
    add_traces(*sub, args.traces);
    add_topk_list(*sub, args.topk);
    std::vector<std::string> words;
    for (const auto& entry : kMethods) words.emplace_back(entry.name);
    sub->add_option_function<std::vector<std::string>>(
           "--methods",
           [&args](const std::vector<std::string>& chosen) {
             args.methods.clear();
             for (const std::string& word : chosen) {
               args.methods.push_back(std::ranges::find(kMethods, std::string_view(word), &Named<Method>::name)->value);
             }
           },
           "methods, separated by commas")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::IsMember(words))
        ->option_text("dense,fused,dosa,auto");
    sub->add_option("--repeats", args.repeats, "timed runs per method")
        ->check(between(1, 10000))
        ->capture_default_str();
    sub->add_option("--queries", args.queries, "only the last queries of the trace; 0: all")
        ->check(not_negative())
        ->capture_default_str();
    sub->add_option("--case", args.case_id, "name of the case in the JSON line; default: the trace's");
    sub->add_option("--commit", args.commit, "text copied into the JSON line");
    add_json(*sub, args.json);
    add_run_options(*sub, args.options, implementation);
    sub->footer(
        "A case whose methods disagree prints no result: the difference goes to stderr, and the exit code is 1.\n\n" +
        examples({"dosa bench a.safetensors --topk 2048,256 --threads 2",
                  "dosa bench a.safetensors --methods dense,dosa --queries 1 --json"}));
    sub->callback([this] {
      bench_args.options.implementation = implementation;
      command = [this] { return bench(bench_args); };
    });
  }

  void add_explain() {
    CLI::App* sub = app.add_subcommand("explain", "Show why a selection took what it took, and check the bounds");
    ExplainArgs& args = explain_args;
    add_traces(*sub, args.traces);
    add_topk_list(*sub, args.topk);
    add_choice(*sub, "--method", args.options.method, kScreeningMethods, "the run that is explained");
    sub->add_option("--rows", args.rows, "queries looked into, evenly spread; 0: all")
        ->check(not_negative())
        ->capture_default_str();
    sub->add_option("--share", args.share, "indexer's share of the prefill time (0.73: GLM-5.2 at 1M tokens)")
        ->check(between(0.0, 1.0))
        ->capture_default_str();
    sub->add_flag("--audit", args.audit,
                  "check the bound of every sampled key in plain scalar code; exit code 1 if one fails");
    add_json(*sub, args.json);
    add_run_options(*sub, args.options, implementation);
    sub->footer(
        "Counters come from a run over all queries; slack and margins from keys sampled evenly for --rows of them.\n"
        "Keys have a score s and a bound U >= s; those with U below tau, the K-th best score of a query, are\n"
        "rejected.\n\n" +
        examples({"dosa explain a.safetensors", "dosa explain a.safetensors --topk 256 --rows 4 --audit",
                  "dosa explain a.safetensors --seeds chain --row-budget 12 --share 0.5 --json"}));
    sub->callback([this] {
      explain_args.options.implementation = implementation;
      command = [this] { return explain(explain_args); };
    });
  }

  void add_synth() {
    CLI::App* synth = app.add_subcommand("synth", "Make a trace");
    synth->require_subcommand(1);
    synth->footer(examples({"dosa synth random --heads 64 --keys 131072 --positive 0.25 --out r.safetensors",
                            "dosa synth adversarial ties --out t.safetensors",
                            "dosa synth scores 3,1,nan,-inf,1 --out s.safetensors",
                            "dosa synth extend traces/demo-h32.safetensors --keys 1048576 --out m.safetensors",
                            "dosa synth decode traces/demo-h32.safetensors --requests 2 --out d.safetensors"}));
    constexpr std::int64_t most_keys = std::numeric_limits<std::int32_t>::max();
    const auto sub = [&](const char* name, const char* help, auto run) {
      CLI::App* app_of_kind = synth->add_subcommand(name, help);
      app_of_kind->add_option("--out", out, "file to write")->required();
      app_of_kind->callback([this, run] { command = run; });
      return app_of_kind;
    };

    CLI::App* kind = sub("random", "Gaussian activations", [this] { return synth_random(random, out); });
    kind->add_option("--heads", random.heads, "indexer heads")->check(between(1, 128))->capture_default_str();
    kind->add_option("--dim", random.dim, "components of a head")
        ->check(CLI::IsMember({32, 64, 128}))
        ->capture_default_str();
    kind->add_option("--keys", random.keys, "keys")->check(between(std::int64_t{0}, most_keys))->capture_default_str();
    kind->add_option("--queries", random.queries, "queries, at the last positions")
        ->check(not_negative())
        ->capture_default_str();
    kind->add_option("--positive", random.positive, "share of heads with a positive weight")
        ->check(between(0.0, 1.0))
        ->capture_default_str();
    kind->add_option("--correlation", random.correlation, "of heads and keys with a direction that all share")
        ->check(between(0.0, 1.0))
        ->capture_default_str();
    kind->add_option("--seed", random.seed, "of the random generator")->check(not_negative())->capture_default_str();

    kind = sub("adversarial", "An input that broke other systems, by name",
               [this] { return synth_adversarial(adversarial, out); });
    std::vector<std::string> names;
    std::string listing = "Names:";
    for (const auto& [name, what] : adversarial_names()) {
      names.push_back(name);
      listing += "\n  " + name + std::string(std::max<std::size_t>(16, name.size() + 1) - name.size(), ' ') + what;
    }
    kind->add_option("name", adversarial.name, "which")->required()->check(CLI::IsMember(names))->option_text("NAME");
    kind->add_option("--keys", adversarial.keys, "keys")
        ->check(between(std::int64_t{0}, most_keys))
        ->capture_default_str();
    kind->add_option("--queries", adversarial.queries, "queries")
        ->check(between(std::int64_t{0}, std::int64_t{1} << 20))
        ->capture_default_str();
    kind->add_option("--heads", adversarial.heads, "indexer heads")->check(between(1, 128))->capture_default_str();
    kind->footer(listing);

    kind = sub("scores", "Keys with exactly these scores", [this] { return synth_scores(scores, out); });
    auto* text = kind->add_option("scores", scores.inline_scores, "numbers, nan, inf or -inf, separated by commas")
                     ->option_text("SCORES");
    auto* file = kind->add_option("--file", scores.file, "the same from a text file")->excludes(text);
    text->excludes(file);
    kind->callback([this, text, file] {
      if (text->empty() && file->empty()) throw CLI::RequiredError("SCORES or --file");
      command = [this] { return synth_scores(scores, out); };
    });
    kind->add_option("--queries", scores.queries, "queries, all alike")
        ->check(between(std::int64_t{0}, std::int64_t{1} << 20))
        ->capture_default_str();

    kind = sub("extend", "A trace with more keys: jittered copies come before its own",
               [this] { return synth_extend(extend, out); });
    kind->add_option("trace", extend.trace, "trace to extend")->required()->option_text("TRACE");
    kind->add_option("--keys", extend.keys, "keys afterwards")->required()->check(between(std::int64_t{0}, most_keys));
    kind->add_option("--jitter", extend.jitter, "noise relative to a key's components")
        ->check(between(0.0, 100.0))
        ->capture_default_str();
    kind->add_option("--seed", extend.seed, "of the random generator")->check(not_negative())->capture_default_str();

    kind = sub("decode", "The queries of a trace as steps of decoding, its keys in pages",
               [this] { return synth_decode(decode, out); });
    kind->add_option("trace", decode.trace, "trace with contiguous keys")->required()->option_text("TRACE");
    kind->add_option("--requests", decode.requests, "requests of a batch; each decodes its stretch of the queries")
        ->check(between(std::int64_t{1}, std::int64_t{1} << 20))
        ->capture_default_str();
    kind->add_option("--draft-tokens", decode.next_n, "queries of a request in a step")
        ->check(between(std::int64_t{1}, std::int64_t{8}))
        ->capture_default_str();
    kind->add_option("--page-size", decode.page_size, "keys of a page")
        ->check(CLI::IsMember({16, 32, 64, 128, 256}))
        ->capture_default_str();
    kind->add_option("--seed", decode.seed, "of the order of pages")->check(not_negative())->capture_default_str();
  }
};

std::vector<const CLI::App*> verbs_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

/// What is wrong with the verb, or with the kind of trace after `synth`. CLI11 would not say which ones there are.
std::optional<std::string> wrong_verb(std::span<char*> words) {
  const CommandLine line;
  std::string said = "dosa";
  const CLI::App* app = &line.app;
  for (std::size_t at = 1; app->get_require_subcommand_min() > 0; ++at) {
    const auto verbs = verbs_of(*app);
    std::vector<std::string> names;
    for (const CLI::App* verb : verbs) names.push_back(verb->get_name());
    const std::string allowed = CLI::detail::join(names, ", ");
    if (at >= words.size()) return fmt::format("{} does nothing alone; it takes {}", said, allowed);
    const std::string word = words[at];
    if (word == "-h" || word == "--help" || word == "--version") return std::nullopt;
    const auto found = std::ranges::find(names, word);
    if (found == names.end()) return fmt::format("there is no {} {}; allowed are {}", said, word, allowed);
    app = verbs[static_cast<std::size_t>(found - names.begin())];
    said += " " + word;
  }
  return std::nullopt;
}

int run(int argc, char** argv) {
  CommandLine line;
  if (const auto wrong = wrong_verb({argv, static_cast<std::size_t>(argc)})) {
    print_error(*wrong);
    return kBadInput;
  }
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return line.app.exit(help);
  } catch (const CLI::ConversionError& error) {
    print_error(std::string(error.what()) + "; it must be a whole number that fits, see --help");
    return kBadInput;
  } catch (const CLI::ParseError& error) {
    print_error(error.what());
    return kBadInput;
  }
  const auto code = line.command();
  if (code) return *code;
  print_error(code.error().message);
  return exit_code_of(code.error().code);
}

}  // namespace
}  // namespace dosa::cli

int main(int argc, char** argv) {
  // A broken invariant aborts; its message is out by then.
  std::signal(SIGABRT, [](int) { std::_Exit(dosa::cli::kOurBug); });
  try {
    return dosa::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    dosa::cli::print_error("not enough memory");
    return dosa::cli::kBadInput;
  } catch (const std::exception& error) {
    dosa::cli::print_error(std::string(error.what()) + "; this is a bug of dosa");
    return dosa::cli::kOurBug;
  }
}
