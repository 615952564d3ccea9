#!/usr/bin/env python3
"""cli_test.py DOSA TRACES: runs the program and checks stdout, stderr and exit codes."""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

DOSA, TRACES = sys.argv[1], pathlib.Path(sys.argv[2])
DEMO = TRACES / "demo-h64.safetensors"
OK, DIFFERENCE, BAD_INPUT, UNSUPPORTED = 0, 1, 2, 3


def read_safetensors(path):
    """name -> (dtype, shape, list of numbers)."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    codes = {"I32": "i", "F32": "f", "F8_E4M3": "B", "U8": "B"}
    result = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + length :][begin:end]
        result[name] = entry["dtype"], entry["shape"], [v for (v,) in struct.iter_unpack("<" + codes[entry["dtype"]], raw)]
    return result


class Program(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)

    def path(self, name):
        return os.path.join(self.directory.name, name)

    def run_dosa(self, *arguments, code=OK):
        done = subprocess.run([DOSA, *map(str, arguments)], capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}{done.stderr}")
        if code == OK:
            self.assertEqual(done.stderr, "")  # no terminal, hence no progress
        return done.stdout

    def error_of(self, *arguments, code=BAD_INPUT):
        done = subprocess.run([DOSA, *map(str, arguments)], capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}{done.stderr}")
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\Adosa: [^\n]+\n\Z")
        return done.stderr

    def synth_scores(self, scores, name="scores.safetensors"):
        path = self.path(name)
        pathlib.Path(self.path("scores.txt")).write_text("\n".join(map(str, scores)))
        self.run_dosa("synth", "scores", "--file", self.path("scores.txt"), "--out", path)
        return path

    # select

    def test_select_writes_the_best_keys(self):
        trace = self.synth_scores([3, 1, "nan", "-inf", 1, -2])
        self.assertEqual(self.run_dosa("select", trace, "--topk", 7, "--out", self.path("o")), "")
        out = read_safetensors(self.path("o"))
        self.assertEqual(out["ids"], ("I32", [1, 7], [0, 1, 4, 5, 3, 2, -1]))
        dtype, shape, scores = out["scores"]
        self.assertEqual((dtype, shape, scores[:5]), ("F32", [1, 7], [3, 1, 1, -2, float("-inf")]))
        self.assertNotEqual(scores[5], scores[5])
        self.assertEqual(scores[6], float("-inf"))

    def test_select_arranges_ids(self):
        trace = self.synth_scores([0.5, 3, 1])
        self.run_dosa("select", trace, "--topk", 2, "--order", "ascending", "--ids", "relative", "--out", self.path("o"))
        self.assertEqual(read_safetensors(self.path("o"))["ids"][2], [1, 2])

    def test_select_summarises(self):
        text = self.run_dosa("select", DEMO)
        for part in ("64 queries x 64 heads, 16384 keys, topk 2048", "rejected", "time", "64 rows"):
            self.assertIn(part, text)

    def test_select_json_is_one_versioned_line(self):
        text = self.run_dosa("select", DEMO, "--topk", 256, "--json", "--method", "dense", "--threads", 1)
        self.assertEqual(text.count("\n"), 1)
        line = json.loads(text)
        self.assertEqual((line["dosa"], line["kind"], line["method"], line["threads"]), (1, "select", "dense", 1))
        self.assertEqual(line["stats"]["path"]["full"], 64)

    def test_select_checks_itself(self):
        self.assertIn("2 rows, equal to full scoring\n", self.run_dosa("select", DEMO, "--verify-rows", 2))

    def test_select_tells_seeds_apart(self):
        self.assertNotIn("as seeds", self.run_dosa("select", DEMO))
        self.assertRegex(self.run_dosa("select", DEMO, "--seeds", "chain"), r"in full \(\d+\.\d % before any bound, as seeds\)\n")

    def test_select_writes_to_a_pipe(self):
        done = subprocess.run(f"'{DOSA}' select '{DEMO}' --out /dev/stdout | wc -c", shell=True, capture_output=True, text=True)
        self.assertGreater(int(done.stdout), 64 * 2048 * 8)

    # verify

    def test_verify_every_adversarial_input(self):
        text = self.run_dosa("synth", "adversarial", "--help")
        names = [line.split()[0] for line in text[text.index("Names:") :].splitlines()[1:]]
        self.assertGreater(len(names), 15)
        for name in names:
            with self.subTest(name=name):
                trace = self.path(name)
                self.run_dosa("synth", "adversarial", name, "--out", trace, "--queries", 10)
                for line in self.run_dosa("verify", trace, "--topk", "1,300,2048", "--json").splitlines():
                    self.assertTrue(json.loads(line)["equal"])

    def test_verify_demo(self):
        text = self.run_dosa("verify", DEMO, "--topk", "2048,256", "--rows", 4)
        self.assertEqual(text.count("equal, ids and score bits"), 8)

    def test_verify_sm90_reference(self):
        line = json.loads(self.run_dosa("verify", DEMO, "--rows", 2, "--reference", "sm90", "--json"))
        self.assertEqual((line["equal"], line["sm90"]["winners"], line["rows"]), (True, 4096, 2))

    # decode traces

    def decode_trace(self, *arguments, keys=3000, queries=24):
        self.run_dosa("synth", "random", "--keys", keys, "--queries", queries, "--heads", 8, "--out", self.path("prefill"))
        self.run_dosa("synth", "decode", self.path("prefill"), *arguments, "--out", self.path("decode"))
        return self.path("decode")

    def test_synth_decode_keeps_every_bit(self):
        trace = self.decode_trace("--requests", 2, "--draft-tokens", 3, "--page-size", 32)
        a, b = read_safetensors(self.path("prefill")), read_safetensors(trace)
        self.assertEqual(b["q"][1], [4, 2, 3, 8, 128])
        self.assertEqual(b["w"][1], [4, 2, 3, 8])
        self.assertEqual(b["kv_cache"][:2], ("U8", [94, 32, 1, 132]))
        self.assertEqual(b["block_table"][1], [2, 94])
        cache, table = bytes(b["kv_cache"][2]), b["block_table"][2]
        self.assertEqual(sorted(table[:94]), list(range(94)))
        self.assertNotEqual(table[:94], list(range(94)))
        for key in (0, 31, 32, 1777, 2999):
            page = cache[table[key // 32] * 32 * 132 :]
            self.assertEqual(list(page[key % 32 * 128 :][:128]), a["k"][2][key * 128 : key * 128 + 128])
            (scale,) = struct.unpack_from("<f", page, 32 * 128 + key % 32 * 4)
            self.assertEqual(scale, a["k_scale"][2][key])
        # Request 1 begins where request 0 ends; row 5 of step 2 is query 12 + 2 * 3 + 2.
        row = (2 * 2 * 3 + 5) * 8 * 128
        self.assertEqual(b["q"][2][row : row + 8 * 128], a["q"][2][20 * 8 * 128 : 21 * 8 * 128])
        self.assertEqual(b["context_lens"][2][17], a["ke"][2][20])

    def test_decode_traces_everywhere(self):
        trace = self.decode_trace("--draft-tokens", 2)
        for space in ("absolute", "relative", "slot"):
            for line in self.run_dosa("verify", trace, "--topk", "20,300", "--ids", space, "--min-context", 1, "--json").splitlines():
                line = json.loads(line)
                self.assertTrue(line["equal"])
                self.assertEqual((line["rows"], line["shape"]["steps"], line["shape"]["page_size"]), (24, 12, 64))
        self.assertIn("12 steps of 1 request x 2 draft tokens", self.run_dosa("select", trace, "--topk", 100))
        line = json.loads(self.run_dosa("bench", trace, "--topk", 100, "--repeats", 1, "--min-context", 1, "--json"))
        stats = line["methods"][2]["stats"]
        self.assertEqual((line["equal"], stats["rows"], stats["path"]["dosa"]), (True, 24, 24))
        self.assertGreater(stats["seeds"], 100)  # the winners of the steps before
        self.run_dosa("select", trace, "--topk", 50, "--out", self.path("ids"), "--ids", "slot", "--verify-rows", 3)
        slots = read_safetensors(self.path("ids"))["ids"]
        self.run_dosa("select", trace, "--topk", 50, "--out", self.path("ids"))
        ids = read_safetensors(self.path("ids"))["ids"]
        table = read_safetensors(trace)["block_table"][2]
        self.assertEqual(slots[1], [24, 50])
        self.assertEqual(slots[2], [table[i // 64] * 64 + i % 64 for i in ids[2]])
        self.assertIn("every bound holds", self.run_dosa("explain", trace, "--topk", 100, "--audit", "--rows", 2))
        self.assertTrue(json.loads(self.run_dosa("verify", trace, "--rows", 2, "--reference", "sm90", "--json"))["equal"])

    def test_decode_traces_that_are_wrong(self):
        trace = pathlib.Path(self.decode_trace("--draft-tokens", 2, queries=4, keys=200))
        whole = trace.read_bytes()
        for what, old, new in [
            ("4 dimensions", b'"kv_cache":{"dtype":"U8","shape":[4,64,1,132]', b'"kv_cache":{"dtype":"U8","shape":[256,132]'),
            ("page_size is 8;", b'"shape":[4,64,1,132]', b'"shape":[32,8,1,132]'),
            ("context_lens", b'"context_lens"', b'"context_lies"'),
            ("requests in context_lens", b'"shape":[2,1,2]', b'"shape":[2,2,1]'),
        ]:
            with self.subTest(what=what):
                self.assertIn(old, whole)
                trace.write_bytes(whole.replace(old, new.ljust(len(old))))
                self.assertIn(what, self.error_of("select", trace))
        trace.write_bytes(whole)
        self.assertIn("steps of decoding", self.error_of("bench", trace, "--queries", 2))
        self.assertIn("in pages", self.error_of("synth", "extend", trace, "--keys", 500, "--out", self.path("x")))
        self.assertIn("in pages", self.error_of("synth", "decode", trace, "--out", self.path("x")))
        self.assertIn("slot", self.error_of("select", DEMO, "--ids", "slot"))
        self.assertIn("takes 96", self.error_of("synth", "decode", self.path("prefill"), "--requests", 96, "--out", self.path("x")))

    # bench

    def test_bench_proves_equality(self):
        line = json.loads(self.run_dosa("bench", DEMO, "--repeats", 2, "--queries", 8, "--json", "--commit", "abc"))
        self.assertEqual((line["equal"], line["commit"], line["shape"]["nq"]), (True, "abc", 8))
        self.assertEqual([m["method"] for m in line["methods"]], ["dense", "fused", "dosa", "auto"])
        self.assertEqual(line["methods"][0]["over_dense"], 1)
        self.assertGreater(line["peak_macs_per_second"], 1e8)
        self.assertEqual(len(line["methods"][0]["seconds"]), 2)

    def test_bench_prints_a_table(self):
        text = self.run_dosa("bench", DEMO, "--repeats", 1, "--queries", 4, "--methods", "dosa,dense", "--topk", "16,2048")
        self.assertEqual(text.count("are equal on every row"), 2)

    # explain

    def test_explain_reads_well(self):
        text = self.run_dosa("explain", DEMO, "--rows", 3, "--topk", "256,2048", "--audit")
        for block in ("Queries.", "Seeds. None", "Slack and margins.", "Work,", "Other row budgets.", "Whole prefill", "Audit."):
            self.assertEqual(text.count(f"\n{block}"), 2, block)
        self.assertEqual(text.count("every bound holds"), 2)
        self.assertEqual(text.count("cheapest\n"), 2)
        self.assertLessEqual(max(map(len, text.splitlines())), 120)

    def test_explain_json_has_the_numbers(self):
        line = json.loads(self.run_dosa("explain", DEMO, "--rows", 2, "--seeds", "chain", "--share", 0.5, "--audit", "--json"))
        self.assertEqual((line["dosa"], line["kind"], line["method"]), (1, "explain", "auto"))
        self.assertEqual([row["row"] for row in line["rows"]], [0, 63])
        for row in line["rows"]:
            self.assertEqual(row["positive_heads"] + row["negative_heads"] + row["zero_heads"], 64)
            self.assertEqual(len(row["sample"]["budgets"]), 16)
            slack = row["sample"]["slack_near_tau_sd"]
            self.assertAlmostEqual(slack.pop("total"), sum(slack.values()))
            self.assertEqual(row["sample"]["margins_sd"], sorted(row["sample"]["margins_sd"]))
            self.assertGreater(row["deficit"], 0)
        speed = line["dense_seconds"] / line["seconds"]
        self.assertAlmostEqual(line["whole_measured"], 1 / (0.5 + 0.5 / speed))
        audit = line["audit"]
        self.assertTrue(audit["passed"] and audit["smallest_slack"] >= 0 and audit["smallest_gap"] > 0)
        self.assertGreater(audit["keys"], audit["rejections"])

    def test_explain_any_data(self):
        for name in ("nan-bytes", "all-nan", "odd-scales", "odd-weights", "huge", "ranges", "same-keys"):
            for method in ("auto", "dosa"):
                with self.subTest(name=name, method=method):
                    self.run_dosa("synth", "adversarial", name, "--out", self.path(name), "--queries", 8)
                    arguments = ["explain", self.path(name), "--topk", "1,300", "--method", method, "--audit"]
                    self.assertEqual(self.run_dosa(*arguments).count("every bound holds"), 2)
                    for line in self.run_dosa(*arguments, "--json").splitlines():
                        self.assertTrue(json.loads(line)["audit"]["passed"])
        self.run_dosa("synth", "random", "--keys", 300, "--queries", 0, "--out", self.path("none"))
        self.run_dosa("explain", self.path("none"), "--audit")

    # synth

    def test_synth_random_is_repeatable(self):
        arguments = ["synth", "random", "--heads", 16, "--keys", 5000, "--queries", 3, "--dim", 64, "--positive", 0.25]
        for name in ("a", "b"):
            self.run_dosa(*arguments, "--out", self.path(name))
        self.assertEqual(pathlib.Path(self.path("a")).read_bytes(), pathlib.Path(self.path("b")).read_bytes())
        weights = read_safetensors(self.path("a"))["w"][2]
        self.assertEqual(sum(w > 0 for w in weights), 3 * 4)
        self.run_dosa("verify", self.path("a"), "--topk", 100)

    def test_synth_extend_keeps_the_trace(self):
        self.run_dosa("synth", "random", "--keys", 300, "--queries", 2, "--heads", 8, "--out", self.path("a"))
        self.run_dosa("synth", "extend", self.path("a"), "--keys", 1000, "--out", self.path("b"))
        a, b = read_safetensors(self.path("a")), read_safetensors(self.path("b"))
        self.assertEqual(b["k"][1], [1000, 128])
        self.assertEqual(b["k"][2][700 * 128 :], a["k"][2])
        self.assertEqual(b["q"], a["q"])
        self.assertEqual(b["ke"][2], [ke + 700 for ke in a["ke"][2]])
        self.run_dosa("verify", self.path("b"), "--topk", 100)

    # info and help

    def test_info_lists_implementations(self):
        line = json.loads(self.run_dosa("info", "--json"))
        self.assertEqual(line["cpu_implementations"][-1], "scalar")
        self.assertEqual([b["name"] for b in line["backends"]], ["cpu", "cuda"])
        for name in line["cpu_implementations"]:
            self.assertIn(name, self.run_dosa("info"))
            self.run_dosa("select", self.synth_scores(range(100)), "--topk", 5, "--implementation", name)

    def test_help_teaches(self):
        for verb in ("select", "verify", "bench", "explain", "synth"):
            self.assertIn("Examples:", self.run_dosa(verb, "--help"))
        self.assertIn("Exit codes", self.run_dosa("--help"))
        self.assertRegex(self.run_dosa("--version"), r"^dosa \d+\.\d+\.\d+$")

    # Bad input

    def test_usage_errors(self):
        for arguments, part in [
            ([], "dosa does nothing alone; it takes select, verify, bench, explain, synth, info"),
            (["frobnicate"], "there is no dosa frobnicate; allowed are select, verify, bench, explain, synth, info"),
            (["synth"], "dosa synth does nothing alone; it takes random, adversarial, scores, extend, decode"),
            (["synth", "trace"], "there is no dosa synth trace; allowed are random, adversarial, scores, extend, decode"),
            (["--nonsense"], "--nonsense"),
            (["select"], "trace"),
            (["select", DEMO, "--topk", 99999999999], "--topk = 99999999999; it must be a whole number that fits"),
            (["verify", DEMO, "--rows", -1], "--rows: -1 is not allowed; allowed are whole numbers from 0"),
            (["explain", DEMO, "--share", "nan"], "--share: nan is not allowed; allowed are 0 to 1"),
            (["synth", "random", "--seed", -1, "--out", self.path("x")], "--seed: -1"),
            (["synth", "scores", "--out", self.path("x")], "SCORES or --file is required"),
            (["select", DEMO, "--method", "magic"], "magic"),
            (["select", DEMO, "--topk", "many"], "many"),
            (["select", DEMO, "--topk", 0], "0"),
            (["select", DEMO, "--topk", 4097], "4097"),
            (["select", DEMO, "--threads", -1], "-1"),
            (["select", DEMO, "--row-budget", -3], "-3"),
            (["select", DEMO, "--memory-budget", 1], "1"),
            (["select", DEMO, "--nonsense"], "--nonsense"),
            (["bench", DEMO, "--methods", "dense,magic"], "magic"),
            (["bench", DEMO, "--repeats", 0], "0"),
            (["explain", DEMO, "--method", "dense"], "dense"),
            (["explain", DEMO, "--share", 1.5], "1.5"),
            (["explain", DEMO, "--row-budget", 65], "65"),
            (["verify", DEMO, "--reference", "tpu"], "tpu"),
            (["verify", DEMO, "--topk", 0, "--reference", "sm90"], "0"),
            (["synth", "scores", "1,two,3", "--out", self.path("x")], "two"),
            (["synth", "adversarial", "nobody", "--out", self.path("x")], "nobody"),
            (["synth", "random", "--heads", 129, "--out", self.path("x")], "129"),
            (["synth", "random", "--keys", 3, "--queries", 5, "--out", self.path("x")], "5"),
            (["synth", "extend", DEMO, "--keys", 5, "--out", self.path("x")], "5"),
            (["synth", "extend", DEMO, "--keys", 20000], "--out"),
        ]:
            with self.subTest(arguments=arguments):
                self.assertIn(part, self.error_of(*arguments))

    def test_a_trace_is_never_replaced_by_what_is_made_of_it(self):
        trace, link = pathlib.Path(self.path("trace")), self.path("link")
        trace.write_bytes(DEMO.read_bytes())
        os.link(trace, link)
        for arguments in (["select"], ["synth", "extend", "--keys", 20000], ["synth", "decode"]):
            for out in (trace, link):
                with self.subTest(arguments=arguments, out=out):
                    self.assertIn("the trace that is read", self.error_of(*arguments, trace, "--out", out))
        self.assertEqual(trace.read_bytes(), DEMO.read_bytes())

    def test_unsupported(self):
        self.assertIn("cuda", self.error_of("select", DEMO, "--backend", "cuda", code=UNSUPPORTED))
        self.assertIn("magic", self.error_of("select", DEMO, "--implementation", "magic", code=UNSUPPORTED))

    def test_bad_files(self):
        whole = DEMO.read_bytes()
        bad = {
            "empty": b"",
            "short": whole[:1000],
            "truncated": whole[:-1],
            "longer": whole + b"x",
            "text": b"This is not a trace at all, only text.",
            "huge-header": struct.pack("<Q", 1 << 60) + whole[8:],
            "dtype": whole.replace(b'"k_scale": {"dtype": "F32"', b'"k_scale": {"dtype": "I32"'),
        }
        for name, data in bad.items():
            with self.subTest(name=name):
                pathlib.Path(self.path(name)).write_bytes(data)
                self.assertIn(name, self.error_of("select", self.path(name)))
        self.error_of("select", self.path("missing"))
        self.error_of("select", self.directory.name)
        self.error_of("verify", self.path("missing"))
        self.error_of("select", DEMO, "--out", self.path("no/such/directory"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
