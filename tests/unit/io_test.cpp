// Files that lie, files that are right, and what comes back from them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <unistd.h>

#include <gtest/gtest.h>

#include "io/json.hpp"
#include "io/safetensors.hpp"
#include "io/trace.hpp"

namespace dosa {
namespace {

std::vector<std::byte> file_of(std::string header, std::size_t data_bytes) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();
  std::vector<std::byte> file(8 + header.size() + data_bytes);
  std::memcpy(file.data(), &length, 8);
  std::memcpy(file.data() + 8, header.data(), header.size());
  return file;
}

std::string complaint(const std::vector<std::byte>& file) {
  const auto parsed = parse_safetensors(file);
  if (parsed) return "";
  EXPECT_EQ(parsed.error().code, ErrorCode::bad_file);
  EXPECT_EQ(parsed.error().message.find('\n'), std::string::npos);
  return parsed.error().message;
}

#define EXPECT_COMPLAINT(file, part) \
  EXPECT_NE(complaint(file).find(part), std::string::npos) << "got: \"" << complaint(file) << '"'

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape, int begin, int end) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[)" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

TEST(Safetensors, ReadsTensorsInOrderOfTheirBytes) {
  auto file = file_of("{" + tensor("b", "U8", "[3]", 8, 11) + "," + tensor("a", "F32", "[2,1]", 0, 8) + "," +
                          tensor("empty", "I64", "[0,5]", 8, 8) + R"(,"__metadata__":{"k":"v"}})",
                      11);
  file.back() = std::byte{7};
  const auto parsed = parse_safetensors(file);
  ASSERT_TRUE(parsed) << parsed.error().message;
  ASSERT_EQ(parsed->tensors.size(), 3U);
  EXPECT_EQ(parsed->tensors[0].name, "a");
  EXPECT_EQ(parsed->find("b")->bytes.back(), std::byte{7});
  EXPECT_EQ(parsed->find("a")->shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_TRUE(parsed->find("empty")->bytes.empty());
  EXPECT_EQ(parsed->find("c"), nullptr);
  EXPECT_EQ(parsed->metadata.at("k"), "v");
}

TEST(Safetensors, KeepsScalarsAndUnknownDtypes) {
  EXPECT_EQ(
      complaint(file_of("{" + tensor("scalar", "F32", "[]", 0, 4) + "," + tensor("new", "F4", "[3]", 4, 6) + "}", 6)),
      "");
}

TEST(Safetensors, RefusesLyingLengths) {
  EXPECT_COMPLAINT({}, "too few");
  EXPECT_COMPLAINT(std::vector<std::byte>(7), "too few");
  for (const std::uint64_t length :
       {std::uint64_t{1} << 62, ~std::uint64_t{0}, std::uint64_t{9}, std::uint64_t{100'000'001}}) {
    auto file = file_of("{}", 0);
    std::memcpy(file.data(), &length, 8);
    EXPECT_COMPLAINT(file, "header length is " + std::to_string(length));
  }
  const auto whole = file_of("{" + tensor("a", "F32", "[2]", 0, 8) + "}", 8);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(complaint({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}), "") << size;
  }
}

TEST(Safetensors, RefusesOffsetsThatDoNotTile) {
  const auto a = tensor("a", "U8", "[4]", 0, 4);
  EXPECT_COMPLAINT(file_of("{" + a + "," + tensor("b", "U8", "[4]", 2, 6) + "}", 6), "overlapping");
  EXPECT_COMPLAINT(file_of("{" + a + "," + tensor("b", "U8", "[4]", 0, 4) + "}", 4), "overlapping");
  EXPECT_COMPLAINT(file_of("{" + a + "," + tensor("b", "U8", "[2]", 6, 8) + "}", 8), "hole");
  EXPECT_COMPLAINT(file_of("{" + a + "}", 5), "the tensors end at data byte 4, the file at 5");
  EXPECT_COMPLAINT(file_of("{" + a + "}", 3), "has 3 bytes of data");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "U8", "[4]", 4, 0) + "}", 4), "[4, 0)");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "U8", "[1]", 0, 1) + "," + tensor("b", "F32", "[1]", 1, 5) + "}", 5),
                   "no multiple of its element size 4");
}

TEST(Safetensors, RefusesShapesThatDoNotMatchTheirBytes) {
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "F32", "[3]", 0, 8) + "}", 8), "has 8 bytes instead of 12");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "F32", "[4611686018427387904,4]", 0, 0) + "}", 0),
                   "more than fit 63 bits");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "F32", "[0,4611686018427387904,4]", 0, 0) + "}", 0),
                   "more than fit 63 bits");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "F32", "[-1]", 0, 4) + "}", 4), "'-1'");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "F32", "[18446744073709551615]", 0, 4) + "}", 4), "18446744073709551615");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "F32", "[1e3]", 0, 4) + "}", 4), "'1e3'");
  EXPECT_COMPLAINT(file_of("{" + tensor("a", "F32", "[[1]]", 0, 4) + "}", 4), "an array");
}

TEST(Safetensors, RefusesHeadersThatAreSomethingElse) {
  const auto a = tensor("a", "U8", "[1]", 0, 1);
  EXPECT_COMPLAINT(file_of("{" + a + "," + a + "}", 1), "name 'a' appears twice");
  EXPECT_COMPLAINT(file_of(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
                   "'dtype' appears twice");
  EXPECT_COMPLAINT(file_of(R"({"__metadata__":{"x":"1","x":"2"}})", 0), "'x' appears twice");
  EXPECT_COMPLAINT(file_of(R"({"__metadata__":{"x":1}})", 0), "'1'");
  EXPECT_COMPLAINT(file_of(R"({"a":{"dtype":"U8","shape":[1]}})", 0), "needs dtype, shape and data_offsets");
  EXPECT_COMPLAINT(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 0), "there must be 2");
  EXPECT_COMPLAINT(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 0), "'2'");
  EXPECT_COMPLAINT(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":0}})", 1), "'more'");
  EXPECT_COMPLAINT(file_of(R"({"a":null})", 0), "null");
  EXPECT_COMPLAINT(file_of(R"(["a"])", 0), "an array");
  EXPECT_COMPLAINT(file_of(R"({"a\n)" + std::string(100, 'x') + R"(":true})", 0), "'a?xxx");
  EXPECT_COMPLAINT(file_of("{}x", 0), "not valid JSON");
  EXPECT_COMPLAINT(file_of("{\"\xff\":1}", 0), "not valid JSON");
  EXPECT_COMPLAINT(file_of("", 0), "not valid JSON");
  EXPECT_COMPLAINT(file_of(std::string(1 << 20, '['), 0), "an array");
}

// A small trace whose tensors each test may spoil.
struct TraceFile {
  std::vector<std::string> tensors = {
      R"("q":{"dtype":"U8","shape":[2,3,4],"data_offsets":[84,108]})",
      R"("k":{"dtype":"F8_E4M3","shape":[5,4],"data_offsets":[64,84]})",
      R"("k_scale":{"dtype":"F32","shape":[5],"data_offsets":[0,20]})",
      R"("w":{"dtype":"F32","shape":[2,3],"data_offsets":[20,44]})",
      R"("q_pos":{"dtype":"I32","shape":[2],"data_offsets":[44,52]})",
      R"("ignored":{"dtype":"I32","shape":[3],"data_offsets":[52,64]})",
  };

  [[nodiscard]] std::vector<std::byte> bytes() const {
    const auto header = std::accumulate(tensors.begin() + 1, tensors.end(), tensors[0],
                                        [](const auto& a, const auto& b) { return a + "," + b; });
    return file_of("{" + header + "}", 108);
  }

  [[nodiscard]] std::string complaint() const {
    const auto trace = Trace::parse(bytes());
    if (trace) return "";
    EXPECT_EQ(trace.error().code, ErrorCode::bad_file);
    return trace.error().message;
  }
};

TEST(Trace, MakesAProblemOfItsTensors) {
  auto bytes = TraceFile().bytes();
  const std::int32_t positions[2] = {3, std::numeric_limits<std::int32_t>::max()};
  std::memcpy(bytes.data() + bytes.size() - 108 + 44, positions, 8);
  auto parsed = Trace::parse(std::move(bytes));
  ASSERT_TRUE(parsed) << parsed.error().message;
  const Trace trace = std::move(*parsed);
  const Problem& p = trace.problem();
  EXPECT_EQ(p.q.dtype, DType::f8_e4m3);
  EXPECT_EQ(p.q.stride, (std::array<std::int64_t, 5>{12, 4, 1}));
  EXPECT_EQ(p.k.shape[0], 5);
  EXPECT_FALSE(p.ks.present());
  EXPECT_EQ(*p.ke.at<std::int32_t>(0), 4);
  EXPECT_EQ(*p.ke.at<std::int32_t>(1), std::numeric_limits<std::int32_t>::max());
}

TEST(Trace, NamesWhatIsWrong) {
  const auto with = [](std::size_t index, std::string replacement) {
    TraceFile file;
    file.tensors[index] = std::move(replacement);
    return file.complaint();
  };
  EXPECT_EQ(TraceFile().complaint(), "");
  EXPECT_EQ(with(0, R"("other":{"dtype":"U8","shape":[24],"data_offsets":[84,108]})"), "tensor q is missing");
  EXPECT_EQ(with(0, R"("q":{"dtype":"I8","shape":[2,3,4],"data_offsets":[84,108]})"),
            "tensor q has dtype 'I8'; it must be F8_E4M3 or U8");
  EXPECT_EQ(with(0, R"("q":{"dtype":"U8","shape":[6,4],"data_offsets":[84,108]})"),
            "tensor q has shape [6, 4]; it must have 3 dimensions");
  EXPECT_EQ(with(0, R"("q":{"dtype":"U8","shape":[2,4,3],"data_offsets":[84,108]})"),
            "dim of k is 4 but dim of q is 3; they must be equal");
  EXPECT_EQ(with(3, R"("w":{"dtype":"F32","shape":[3,2],"data_offsets":[20,44]})"),
            "rows of w is 3 but rows of q is 2; they must be equal");
  EXPECT_NE(with(4, R"("ks":{"dtype":"I32","shape":[2],"data_offsets":[44,52]})"), "");
  EXPECT_NE(with(5, R"("ks":{"dtype":"I32","shape":[3],"data_offsets":[52,64]})"), "");
  EXPECT_NE(with(4, R"("x":{"dtype":"I32","shape":[2],"data_offsets":[44,52]})"), "");
}

struct TemporaryFile {
  std::string path =
      (std::filesystem::temp_directory_path() / ("dosa-io-test-" + std::to_string(::getpid()) + ".safetensors"))
          .string();
  ~TemporaryFile() { std::filesystem::remove(path); }
};

TEST(Trace, SavesWhatItReads) {
  const auto demo = Trace::open(DOSA_TRACES "/demo-h64.safetensors");
  ASSERT_TRUE(demo) << demo.error().message;
  Problem problem = demo->problem();
  problem.q.shape[0] = problem.w.shape[0] = problem.ke.shape[0] = 5;
  problem.w.stride[0] *= 2;  // not dense: every other row
  const TemporaryFile file;
  ASSERT_TRUE(save_trace(file.path, problem, {{"domain", "test"}}));

  const auto copy = Trace::open(file.path);
  ASSERT_TRUE(copy) << copy.error().message;
  EXPECT_EQ(copy->metadata().at("domain"), "test");
  EXPECT_EQ(*copy->problem().w.at<float>(4, 3), *demo->problem().w.at<float>(8, 3));
  EXPECT_EQ(*copy->problem().ke.at<std::int32_t>(4), *demo->problem().ke.at<std::int32_t>(4));
  EXPECT_EQ(*copy->problem().ks.at<std::int32_t>(4), 0);
  EXPECT_EQ(std::memcmp(copy->problem().k.data, problem.k.data, static_cast<std::size_t>(problem.k.shape[0]) * 128), 0);
}

TEST(Trace, ReportsFilesThatCannotBeRead) {
  EXPECT_EQ(Trace::open("/nonexistent/trace").error().code, ErrorCode::io);
  EXPECT_EQ(Trace::open("/dev/null").error().code, ErrorCode::io);
  const TemporaryFile file;
  std::ofstream(file.path) << "";
  EXPECT_EQ(Trace::open(file.path).error().code, ErrorCode::bad_file);
}

TEST(Selection, IsSavedDense) {
  const TemporaryFile file;
  std::int32_t ids[2][4] = {{1, 2, 3, 99}, {4, 5, -1, 99}};  // the last column is padding of the caller
  Selection selection{dense_view<void>(ids, DType::i32, {2, 3}), {}};
  selection.ids.stride[0] = 4;
  ASSERT_TRUE(save_selection(file.path, selection, {}));
  const auto mapped = MappedFile::open(file.path);
  const auto parsed = parse_safetensors(mapped->bytes());
  ASSERT_TRUE(parsed) << parsed.error().message;
  ASSERT_EQ(parsed->tensors.size(), 1U);
  std::int32_t stored[6];
  std::memcpy(stored, parsed->find("ids")->bytes.data(), sizeof stored);
  EXPECT_TRUE(std::ranges::equal(stored, std::array{1, 2, 3, 4, 5, -1}));
  EXPECT_EQ(save_selection("/nonexistent/x", selection, {}).error().code, ErrorCode::io);
}

TEST(JsonObject, IsOneOrderedLine) {
  const double times[2] = {0.5, std::numeric_limits<double>::infinity()};
  JsonObject record("bench");
  record.add("z", std::int64_t{1} << 40)
      .add("a", true)
      .add("path", "x\ny\xff")
      .add("times", std::span<const double>(times));
  EXPECT_EQ(record.line(),
            "{\"dosa\":1,\"kind\":\"bench\",\"z\":1099511627776,\"a\":true,\"path\":\"x\\ny\xEF\xBF\xBD\",\"times\":[0."
            "5,null]}");
}

}  // namespace
}  // namespace dosa
