# Tests that are scripts: checks of the sources, of scripts and of the installed files, and Python tests.
foreach(check floors scripts includes format)
  add_test(NAME ${check} COMMAND ${PROJECT_SOURCE_DIR}/tests/checks/${check}.sh ${PROJECT_SOURCE_DIR})
endforeach()
set_tests_properties(scripts PROPERTIES PROCESSORS 4)
set_tests_properties(format PROPERTIES ${test_properties})
add_test(NAME "a folder with a blank in its name" COMMAND ${PROJECT_SOURCE_DIR}/tests/checks/blank.sh ${PROJECT_SOURCE_DIR})
add_test(NAME "a path with words that also choose sources"
  COMMAND ${PROJECT_SOURCE_DIR}/tests/checks/paths.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR} ${CMAKE_COMMAND})
find_program(PYTHON3 python3)
if(PYTHON3 AND EXISTS ${PROJECT_SOURCE_DIR}/.git)  # these checks list the files of the repository by git
  add_test(NAME counts COMMAND ${PYTHON3} ${PROJECT_SOURCE_DIR}/tests/checks/counts.py)
  add_test(NAME excerpts COMMAND ${PYTHON3} ${PROJECT_SOURCE_DIR}/tests/checks/excerpts.py ${PROJECT_SOURCE_DIR})
endif()
add_test(NAME "the installed library in a C program"
  COMMAND ${PROJECT_SOURCE_DIR}/tests/checks/installed.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR} ${CMAKE_COMMAND})
set_tests_properties("the installed library in a C program" PROPERTIES ${test_properties})
add_test(NAME "skipped, failed or passed, as ctest sees it"
  COMMAND ${PROJECT_SOURCE_DIR}/tests/checks/skips.sh ${CMAKE_CTEST_COMMAND} "${test_properties}" $<TARGET_FILE:triad_tests>)
# triad_python_test(NAME SCRIPT arguments...): skipped where Python lacks torch or transformers.
function(triad_python_test name script)
  if(PYTHON3)
    add_test(NAME ${name} COMMAND ${PYTHON3} ${PROJECT_SOURCE_DIR}/tests/${script} ${ARGN})
    set_tests_properties(${name} PROPERTIES ${test_properties})
  endif()
endfunction()
triad_python_test("resources: limits of cards" checks/test_resources.py)
triad_python_test("text corpus: documents of packages" checks/test_text_corpus.py)
triad_python_test("chat: conversations have the tokens and masks of transformers"
  io/test_chat_templates.py $<TARGET_FILE:triad>)
triad_python_test("huggingface: imported models compute what transformers computes"
  tools/test_huggingface_import.py $<TARGET_FILE:triad>)
triad_python_test("huggingface: exported models compute what the engine computes"
  tools/test_huggingface_export.py $<TARGET_FILE:triad>)
triad_python_test("chat: an imported model that was fine-tuned answers as in transformers"
  tools/test_huggingface_chat.py $<TARGET_FILE:triad>)
triad_python_test("lora: runs and adapters are those of PEFT" tools/test_lora_peft.py $<TARGET_FILE:triad>)
triad_python_test("tokenizer train: what the tokenizers library learns" tools/test_tokenizer_train.py $<TARGET_FILE:triad>)
triad_python_test("checkpoints of several files: Python's loaders read them"
  tools/test_sharded_checkpoint.py $<TARGET_FILE:triad>)
triad_python_test("packages: wheels, and which build they hold" tools/test_packages.py $<TARGET_FILE:triad>)
if(NOT TRIAD_SANITIZE)  # the tests wait a few seconds for what must end in time
  triad_python_test("hosts: runs on several hosts, and how they end" hosts/test_hosts.py $<TARGET_FILE_DIR:triad>)
  if(PYTHON3)
    set_tests_properties("hosts: runs on several hosts, and how they end" PROPERTIES COST 200)
  endif()
endif()
if(NOT TRIAD_SANITIZE)  # Python cannot load a library that needs the sanitizers' runtime
  triad_python_test("pytorch: the package triad_nsa"
    pytorch/test_pytorch.py --library $<TARGET_FILE:triad_nsa> --program $<TARGET_FILE:triad>)
endif()
