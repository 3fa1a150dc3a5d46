// What a run's data files hold, so that a resume recognizes them wherever they are.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/json_config.h"

namespace triad {

struct DataFile {
  std::string name = {};  // file name without its folder
  int64_t bytes = 0;
  uint32_t crc32 = 0;  // CRC-32 of the whole file
  bool same_content(const DataFile& other) const { return bytes == other.bytes && crc32 == other.crc32; }
};
using DataFiles = std::shared_ptr<const std::vector<DataFile>>;  // files in reading order; null: unknown

std::string file_name_of(const std::string& path);
// For messages: "a.txt" for one file, "12 text files (a.txt, ...)" for several.
std::string files_text(const char* kind, const std::vector<std::string>& files);
DataFile describe_data_file(const std::string& path);  // reads the file
DataFiles describe_data_files(const std::vector<std::string>& paths);

// For state.json: a line for each file as cksum writes it, "1a2b3c4d 203024 train_000000.bin".
Json files_to_json(const std::vector<DataFile>&);
// Throws an Error that names `what` and the value if this is not such a list.
std::vector<DataFile> files_from_json(const Json&, const std::string& what);

uint32_t checksum_of(const InputFile&, int64_t begin);  // CRC-32 from `begin` on
uint32_t checksum_of(const std::vector<DataFile>&);     // CRC-32 over the files' contents, in order

// How the files differ from those before, name by name; empty: in nothing but their names.
std::string changed_files(const std::vector<DataFile>& before, const std::vector<DataFile>& now);

// Throws an Error that names both files if a file in one list has the same content as one in the other.
void check_no_overlap(const std::vector<DataFile>& train, const std::vector<DataFile>& val);

}  // namespace triad
