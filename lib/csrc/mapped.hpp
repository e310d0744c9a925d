// Memory-mapped file without an open file descriptor.
#pragma once

#include <cstdint>
#include <string>

namespace tokamake {

// Pages come from disk when they are read. Python's mmap keeps a descriptor open, and many
// processes may open only 1,024: too few for a mixture of thousands of datasets.
class MappedFile {
 public:
  // Throws std::system_error if the file cannot be opened or mapped.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  const uint8_t* data_ = nullptr;  // null: the file is empty
  int64_t size_ = 0;
};

}  // namespace tokamake
