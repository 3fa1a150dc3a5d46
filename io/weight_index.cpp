#include "io/weight_index.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "io/file_name.h"
#include "io/json_config.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kExtension = ".safetensors";
constexpr const char* kIndexExtension = ".safetensors.index.json";

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

// Says why a folder has no weights that can be read, from the other files in it.
[[noreturn]] void refuse_folder(const std::string& folder) {
  std::error_code ignored;
  if (!fs::exists(folder, ignored)) fail("{}: there is no such folder", folder);
  refuse_adapter(folder);
  std::string others;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string(), extension = entry.path().extension().string();
    if (extension == ".safetensors" || extension == ".bin" || extension == ".pth" || extension == ".gguf")
      others += (others.empty() ? "" : ", ") + printable(name);
  }
  fail("{}: it holds neither {} nor {}{}", folder, whole_file_name(kWeightsStem), index_file_name(kWeightsStem),
       others.empty() ? "" : fmt::format(", but {}: save the model again as safetensors", shortened(others)));
}

std::string path_in(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

}  // namespace

std::string whole_file_name(const std::string& stem) { return stem + kExtension; }

std::string part_file_name(const std::string& stem, int64_t part, int64_t of) {
  return fmt::format("{}-{:05}-of-{:05}{}", stem, part + 1, of, kExtension);
}

std::string index_file_name(const std::string& stem) { return stem + kIndexExtension; }

bool is_tensor_file_name(const std::string& name, const std::string& stem) {
  if (name == whole_file_name(stem) || name == index_file_name(stem)) return true;
  // STEM-00001-of-00002.safetensors; transformers writes more digits if five do not suffice.
  if (!name.starts_with(stem + "-") || !name.ends_with(kExtension)) return false;
  const std::string_view numbers =
      std::string_view(name).substr(stem.size() + 1, name.size() - stem.size() - 1 - whole_file_name("").size());
  const size_t of = numbers.find("-of-");
  const auto is_number = [](std::string_view text) {
    return text.size() >= 5 && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return of != std::string_view::npos && is_number(numbers.substr(0, of)) && is_number(numbers.substr(of + 4));
}

std::string tensors_path(const std::string& folder, const std::string& stem) {
  const std::string whole = path_in(folder, whole_file_name(stem)), index = path_in(folder, index_file_name(stem));
  return !is_file(whole) && is_file(index) ? index : whole;
}

bool has_tensors(const std::string& folder, const std::string& stem) { return is_file(tensors_path(folder, stem)); }

void refuse_adapter(const std::string& folder) {
  constexpr const char* kAdapter = "adapter_config.json";
  if (!is_file(fs::path(folder) / kAdapter) || has_tensors(folder)) return;
  fail("{}: is an adapter of PEFT ({}), no model: merge it into its base model (merge_and_unload), and save that",
       folder, kAdapter);
}

std::map<std::string, std::string> read_weight_map(const std::string& path) {
  // Not ordered: an ordered object would search its keys linearly.
  const auto json = parse_json<nlohmann::json>(read_file(path), path);
  constexpr const char* kKey = "weight_map";
  TRIAD_CHECK(json.is_object() && json.contains(kKey) && json[kKey].is_object(),
              "{}: an object with a key {}, an object, is needed, found {}", path, kKey, brief(json));
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : json[kKey].items()) {
    TRIAD_CHECK(file.is_string(), "{}: the file of tensor {} is {}: a string is needed", path, shortened(tensor),
                brief(file));
    const auto name = file.get<std::string>();
    TRIAD_CHECK(is_file_name(name), "{}: the file of tensor {} is {}: a name without a path is needed", path,
                shortened(tensor), brief(file));
    files.emplace(tensor, name);
  }
  TRIAD_CHECK(!files.empty(), "{}: {} names no tensor", path, kKey);
  return files;
}

std::string weight_map_json(const std::map<std::string, std::string>& file_of, int64_t total_bytes) {
  const nlohmann::ordered_json json = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", file_of}};
  return json.dump(2) + "\n";
}

WeightIndex::WeightIndex(const std::string& path) : path_(path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    if (!has_tensors(path)) refuse_folder(path);
    path_ = tensors_path(path);
  }
  if (path_.ends_with(kIndexExtension))
    open_indexed();
  else
    files_.emplace_back(path_);
  for (size_t i = 0; i < files_.size(); ++i)
    for (const TensorEntry& entry : files_[i].entries()) {
      const auto [place, fresh] = file_of_.emplace(entry.name, i);
      TRIAD_CHECK(fresh, "{}: tensor {} is in {}, too", files_[i].path(), shortened(entry.name),
                  files_[place->second].path());
    }
}

void WeightIndex::open_indexed() {
  const fs::path folder = fs::path(path_).parent_path();
  const std::string index = fs::path(path_).filename().string();
  const std::map<std::string, std::string> map = read_weight_map(path_);
  std::map<std::string, size_t> positions;  // position of each file in files_
  for (const auto& [tensor, file] : map) positions.emplace(file, 0);
  for (auto& [name, position] : positions) {
    const fs::path path = folder / name;
    const auto in_file = [&file = name](const auto& one) { return one.second == file; };
    TRIAD_CHECK(is_file(path), "{}: file {} is missing, which {} names for {}", folder.string(), shortened(name), index,
                counted(std::count_if(map.begin(), map.end(), in_file), "tensor"));
    position = files_.size();
    files_.emplace_back(path.string());
  }
  for (const auto& [tensor, name] : map) {
    const SafetensorsFile& file = files_[positions.at(name)];
    TRIAD_CHECK(file.find(tensor) != nullptr, "{}: there is no tensor {}, which {} places there", file.path(),
                shortened(tensor), index);
  }
  for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    TRIAD_CHECK(map.contains(entry.name), "{}: tensor {} is not in {}", file.path(), shortened(entry.name), index);
  });
}

int64_t WeightIndex::bytes() const {
  int64_t total = 0;
  for_each([&](const SafetensorsFile&, const TensorEntry& entry) { total += entry.bytes(); });
  return total;
}

const TensorEntry* WeightIndex::find(std::string_view name) const {
  const auto it = file_of_.find(name);
  return it == file_of_.end() ? nullptr : files_[it->second].find(name);
}

const TensorEntry& WeightIndex::at(std::string_view name) const { return file_of(name).at(name); }

const SafetensorsFile& WeightIndex::file_of(std::string_view name) const {
  const auto it = file_of_.find(name);
  TRIAD_CHECK(it != file_of_.end(), "{}: there is no tensor {} among its {}", path_, shortened(name), count());
  return files_[it->second];
}

void WeightIndex::for_each(const std::function<void(const SafetensorsFile&, const TensorEntry&)>& f) const {
  for (const SafetensorsFile& file : files_)
    for (const TensorEntry& entry : file.entries()) f(file, entry);
}

}  // namespace triad
