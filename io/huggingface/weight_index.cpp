#include "io/huggingface/weight_index.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "engine/check.h"
#include "io/json_config.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

// Says why a folder has no weights that can be read, from the other files in it.
[[noreturn]] void refuse_folder(const std::string& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) fail("{}: there is no such folder", folder);
  std::string others;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string(), extension = entry.path().extension().string();
    if (extension == ".safetensors" || extension == ".bin" || extension == ".pth" || extension == ".gguf")
      others += (others.empty() ? "" : ", ") + printable(name);
  }
  fail("{}: it holds neither {} nor {}{}", folder, kWhole, kIndex,
       others.empty() ? "" : fmt::format(", but {}: save the model again as safetensors", shortened(others)));
}

}  // namespace

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
    const bool plain = !name.empty() && name != "." && name != ".." &&
                       name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
    TRIAD_CHECK(plain, "{}: the file of tensor {} is {}: a name without a path is needed", path, shortened(tensor),
                brief(file));
    files.emplace(tensor, name);
  }
  TRIAD_CHECK(!files.empty(), "{}: {} names no tensor", path, kKey);
  return files;
}

WeightIndex::WeightIndex(const std::string& folder) {
  const fs::path index = fs::path(folder) / kIndex;
  // If a folder has both, transformers reads the whole file, too.
  if (is_file(fs::path(folder) / kWhole)) {
    files_.emplace_back((fs::path(folder) / kWhole).string());
  } else if (is_file(index)) {
    const std::map<std::string, std::string> map = read_weight_map(index.string());
    std::map<std::string, size_t> positions;  // of each file in files_
    for (const auto& [tensor, file] : map) positions.emplace(file, 0);
    for (auto& [name, position] : positions) {
      const fs::path path = fs::path(folder) / name;
      const auto in_file = [&file = name](const auto& one) { return one.second == file; };
      TRIAD_CHECK(is_file(path), "{}: file {} is missing, which {} names for {} tensors", folder, shortened(name),
                  kIndex, std::count_if(map.begin(), map.end(), in_file));
      position = files_.size();
      files_.emplace_back(path.string());
    }
    for (const auto& [tensor, name] : map) {
      const SafetensorsFile& file = files_[positions.at(name)];
      TRIAD_CHECK(file.find(tensor) != nullptr, "{}: there is no tensor {}, which {} places there", file.path(),
                  shortened(tensor), kIndex);
    }
    for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
      TRIAD_CHECK(map.contains(entry.name), "{}: tensor {} is not in {}", file.path(), shortened(entry.name), kIndex);
    });
  } else {
    refuse_folder(folder);
  }
  for (size_t i = 0; i < files_.size(); ++i)
    for (const TensorEntry& entry : files_[i].entries()) {
      const auto [place, fresh] = file_of_.emplace(entry.name, i);
      TRIAD_CHECK(fresh, "{}: tensor {} is in {}, too", files_[i].path(), shortened(entry.name),
                  files_[place->second].path());
    }
}

const TensorEntry* WeightIndex::find(std::string_view name) const {
  const auto it = file_of_.find(name);
  return it == file_of_.end() ? nullptr : files_[it->second].find(name);
}

const SafetensorsFile& WeightIndex::file_of(std::string_view name) const {
  const auto it = file_of_.find(name);
  TRIAD_CHECK(it != file_of_.end(), "there is no tensor {} among the {} of {} files", shortened(name), count(),
              files_.size());
  return files_[it->second];
}

void WeightIndex::for_each(const std::function<void(const SafetensorsFile&, const TensorEntry&)>& f) const {
  for (const SafetensorsFile& file : files_)
    for (const TensorEntry& entry : file.entries()) f(file, entry);
}

}  // namespace triad
