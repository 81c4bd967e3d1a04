# install, the CMake package, attn.pc, and the Debian packages of CPack.
include(CMakePackageConfigHelpers)

set(attn_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/attn")
install(TARGETS attn_shared EXPORT attn-shared
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime
            NAMELINK_COMPONENT dev)
install(TARGETS attn_static EXPORT attn-static
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT dev)
install(FILES include/attn.h
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT dev)

# Two sets: who uses the shared library is never asked for a BLAS.
foreach(kind IN ITEMS shared static)
    install(EXPORT attn-${kind} NAMESPACE attn:: FILE attn-${kind}.cmake
        DESTINATION "${attn_cmake_dir}" COMPONENT dev)
    export(EXPORT attn-${kind} NAMESPACE attn::
        FILE "${PROJECT_BINARY_DIR}/attn-${kind}.cmake")
endforeach()
configure_package_config_file(cmake/attnConfig.cmake.in attnConfig.cmake
    INSTALL_DESTINATION "${attn_cmake_dir}"
    NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(attnConfigVersion.cmake
    COMPATIBILITY SameMajorVersion)
install(FILES "${PROJECT_BINARY_DIR}/attnConfig.cmake"
              "${PROJECT_BINARY_DIR}/attnConfigVersion.cmake"
    DESTINATION "${attn_cmake_dir}" COMPONENT dev)

# attn.pc finds itself, so that the tree may be moved. Only /usr is written
# out: pkg-config then knows that its folders need no -I and no -L.
set(attn_pc_libdir "${CMAKE_INSTALL_LIBDIR}")
set(attn_pc_includedir "${CMAKE_INSTALL_INCLUDEDIR}")
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr"
   OR IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}"
   OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
    set(attn_pc_prefix "${CMAKE_INSTALL_PREFIX}")
    set(attn_pc_libdir "${CMAKE_INSTALL_FULL_LIBDIR}")
    set(attn_pc_includedir "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
else()
    file(RELATIVE_PATH attn_pc_up
        "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
    string(REGEX REPLACE "/$" "" attn_pc_up "${attn_pc_up}")
    set(attn_pc_prefix "\${pcfiledir}/${attn_pc_up}")
    set(attn_pc_libdir "\${prefix}/${attn_pc_libdir}")
    set(attn_pc_includedir "\${prefix}/${attn_pc_includedir}")
endif()
set(attn_pc_private "${ATTN_CBLAS_PC} -lm -pthread")
if(CMAKE_DL_LIBS)
    string(APPEND attn_pc_private " -l${CMAKE_DL_LIBS}")
endif()
configure_file(attn.pc.in attn.pc @ONLY)
configure_file(attn-uninstalled.pc.in attn-uninstalled.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/attn.pc"
    DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT dev)

if(PROJECT_IS_TOP_LEVEL)
    include(AttnPackage)
endif()
